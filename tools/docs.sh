#!/bin/sh
# Build the documentation site into site/, in a separate virtual environment.
set -eu
python=${PYTHON:-python3}
venv=${DOCS_VENV:-.venv-docs}
sh tools/venv.sh "$python" "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --progress-bar off \
    -c constraints-docs.txt mkdocs-material 'mkdocstrings[python]'
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --quiet --site-dir "${SITE:-site}"
echo "The site is in ${SITE:-site}/index.html"
