// Checks histories of tests/faults with Porcupine: is each journal linearizable?
//
// Usage: check FILE.jsonl... (docs/verification.md states the model and how to build this program.)
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
	pb "go.gazette.dev/core/broker/protocol"
)

// An operation of a history. Fields are those of coranto.testing.history_files.porcupine_lines.
type operation struct {
	Journal, Client, Kind, Refusal string
	Call, Return, Size             int64
	Offset, Begin                  int64
	Check                          *pb.LabelSelector
	Union, Subtract, Registers     *pb.LabelSet
}

// The state of a journal: its end, and its registers.
type state struct {
	end       int64
	registers pb.LabelSet
}

func step(before, input, _ interface{}) (bool, interface{}) {
	var s, op = before.(state), input.(operation)
	var matches = op.Check == nil || len(s.registers.Labels) == 0 || op.Check.Matches(s.registers)
	switch op.Refusal {
	case "REGISTER_MISMATCH":
		return !matches && (op.Registers == nil || s.registers.Equal(*op.Registers)), s
	case "WRONG_APPEND_OFFSET":
		return op.Offset != s.end, s
	}
	if op.Begin != s.end || !matches || (op.Offset != 0 && op.Offset != s.end) {
		return false, s
	}
	var after = state{end: s.end + op.Size, registers: s.registers}
	if op.Subtract != nil {
		after.registers = pb.SubtractLabelSet(after.registers, *op.Subtract, pb.LabelSet{})
	}
	if op.Union != nil {
		after.registers = pb.UnionLabelSets(*op.Union, after.registers, pb.LabelSet{})
	}
	return op.Registers == nil || after.registers.Equal(*op.Registers), after
}

var model = porcupine.Model{
	Init: func() interface{} { return state{} },
	Step: step,
	Equal: func(one, other interface{}) bool {
		var a, b = one.(state), other.(state)
		return a.end == b.end && a.registers.Equal(b.registers)
	},
}

// read returns the operations of a file by journal.
func read(path string) (map[string][]porcupine.Operation, int, error) {
	var journals, clients, count = map[string][]porcupine.Operation{}, map[string]int{}, 0
	var file, err = os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer file.Close()
	for lines := json.NewDecoder(bufio.NewReader(file)); lines.More(); count++ {
		var op operation
		if err := lines.Decode(&op); err != nil {
			return nil, 0, err
		}
		if _, ok := clients[op.Client]; !ok {
			clients[op.Client] = len(clients)
		}
		journals[op.Journal] = append(journals[op.Journal], porcupine.Operation{
			ClientId: clients[op.Client], Input: op, Call: op.Call, Return: op.Return,
		})
	}
	return journals, count, nil
}

func main() {
	var total, bad = 0, 0
	for _, path := range os.Args[1:] {
		var journals, count, err = read(path)
		if err != nil {
			fmt.Println(path, err)
			os.Exit(2)
		}
		total += count
		for name, operations := range journals {
			var begun = time.Now()
			var result = porcupine.CheckOperationsTimeout(model, operations, 5*time.Minute)
			fmt.Printf("%s %s: %d operations, %s in %.1f s\n", path, name, len(operations), result, time.Since(begun).Seconds())
			if result != porcupine.Ok {
				bad++
			}
		}
	}
	fmt.Printf("%d operations; %d journals not linearizable or not decided\n", total, bad)
	if bad > 0 {
		os.Exit(1)
	}
}
