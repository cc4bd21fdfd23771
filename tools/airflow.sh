#!/bin/sh
# Create a separate virtual environment for Airflow, because Airflow has many requirements.
set -eu
python=${PYTHON:-python3}
venv=${AIRFLOW_VENV:-.venv-airflow}
constraints=${AIRFLOW_CONSTRAINTS:-constraints-airflow.txt}
sh tools/venv.sh "$python" "$venv"
echo "Installing Coranto and Airflow (some minutes the first time) …"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --progress-bar off \
    -c "$constraints" -e '.[airflow-dev]'
echo "Installed into $venv."
