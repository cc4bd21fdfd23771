#!/bin/sh
# Create the virtual environment $2 with the interpreter $1, or keep it if this interpreter created it.
# An environment of another interpreter is recreated: its packages may be incompatible.
set -eu
python=$1
venv=$2
interpreter=$("$python" tools/pythons.py --identify)
if [ ! -x "$venv/bin/python" ] || [ "$("$venv/bin/python" tools/pythons.py --identify 2>/dev/null)" != "$interpreter" ]; then
    echo "Creating $venv with $interpreter …"
    "$python" -m venv --clear "$venv"
fi
echo "$interpreter" > "$venv/.interpreter"
