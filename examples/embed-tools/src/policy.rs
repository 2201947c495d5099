//! What a policy could have answered: a program with a mistake, which it finds and mends.

use serde_json::{Map, Value, json};

const PROGRAM: &str = "\
import sys

def primes(n):
    return [p for p in range(1, n) if all(p % d for d in range(2, p))]

if __name__ == '__main__':
    print(*primes(int(sys.argv[1])))
";

/// Returns the calls in order, each the name of a tool and its arguments.
pub(crate) fn calls() -> impl Iterator<Item = (&'static str, Map<String, Value>)> {
    let path = "/workspace/primes.py";
    [
        ("str_replace_editor", json!({"command": "create", "path": path, "file_text": PROGRAM})),
        ("execute_bash", json!({"command": "python3 primes.py 20"})),
        (
            "str_replace_editor",
            json!({"command": "str_replace", "path": path, "old_str": "range(1, n)", "new_str": "range(2, n)"}),
        ),
        ("execute_bash", json!({"command": "python3 primes.py 20"})),
        // Models guess names; what they read then lets them do better.
        ("count_words", json!({"file": path})),
        ("count_words", json!({"path": path})),
        ("execute_ipython_cell", json!({"code": "from primes import primes\nsum(primes(100))"})),
        ("finish", json!({"message": "The primes below 100 sum up to 1060."})),
    ]
    .into_iter()
    .filter_map(|(name, arguments)| match arguments {
        Value::Object(arguments) => Some((name, arguments)),
        _ => None,
    })
}
