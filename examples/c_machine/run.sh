#!/bin/sh
# Build the machine, write models and inputs, run them, judge the outputs. Arguments are options of the compiler: -DBUG=1
set -eu
cd "$(dirname "$0")"
rm -rf build/bundle build/outputs
mkdir -p build
cc -std=c99 -O2 -Wall -Wextra -Wpedantic -Werror "$@" machine.c -o build/machine -lm
fx-quant-conformance export --backend=config:CMachine --profile=quick -o build/bundle
build/machine build/bundle/device build/outputs
fx-quant-conformance judge build/bundle build/outputs
