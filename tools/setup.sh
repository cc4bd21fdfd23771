#!/bin/sh
# Create the virtual environment and install Coranto with all its parts, with the versions of constraints.txt.
set -eu
python=${PYTHON:-python3}
venv=${VENV:-.venv}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Coranto needs Python 3.11 or newer; $("$python" --version) is $(command -v "$python"). Select another with 'make PYTHON=python3.12 …'." >&2
    exit 1
}
sh tools/venv.sh "$python" "$venv"
echo "Installing Coranto and its requirements (some minutes the first time) …"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[demo,dev]'
echo "Installed into $venv."
