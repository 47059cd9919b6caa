#!/bin/sh
# Generates services/common/pb/ under the folder given: generate_proto.sh PYTHON FOLDER
# The virtual path in -I gives the generated modules absolute imports that work as they are.
set -eu
exec "$1" -m grpc_tools.protoc -Iservices/common/pb=proto \
    --python_out="$2" --pyi_out="$2" proto/*.proto
