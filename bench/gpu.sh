#!/bin/sh
# Everything of ours that touches CUDA, tried on this machine's GPU, and the host engine on its cores: under ten minutes.
# What is missing is skipped in a line, what fails does not stop the rest. The last line says where the JSON lies.
#
#     bench/gpu.sh [--out FILE.json] [--only NAME ...] [--ranks 2,4,8,16] [--times 2] [--logs FOLDER]
# (PYTHON: default .venv/bin/python)
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-.venv/bin/python}" -m bench.gpu "$@"
