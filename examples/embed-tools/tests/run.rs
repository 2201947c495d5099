//! The example does what its README says.

use std::process::{Command, Stdio};

#[test]
fn a_program_is_written_run_and_mended_and_all_of_it_is_read() {
    let out = Command::new(env!("CARGO_BIN_EXE_embed-tools")).stdin(Stdio::null()).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{stdout}\n{stderr}");
    for part in [
        "\nFile created successfully at: /workspace/primes.py\n",
        "\n1 2 3 5 7 11 13 17 19\n[The command completed with exit code 0.]\n",
        "\n     4\t    return [p for p in range(2, n) if all(p % d for d in range(2, p))]\n",
        "\n2 3 5 7 11 13 17 19\n[The command completed with exit code 0.]\n",
        "\nMissing argument `path` of `count_words`. Unknown argument `file` of `count_words`. Did you mean `path`? It takes: \
         `path`.\n(error)\n",
        "\n/workspace/primes.py has 25 words.\n",
        "sum(primes(100))\"}\n1060\n",
        "\nanswer: The primes below 100 sum up to 1060.\n",
    ] {
        assert!(stdout.contains(part), "{part:?} is not in\n{stdout}");
    }
}
