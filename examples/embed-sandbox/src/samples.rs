//! What a policy could have answered: programs that are right, wrong, broken, endless or greedy.

/// One program to be tested.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// What it was asked for.
    pub(crate) task: &'static str,
    /// What the policy wrote: a script of `sh` that reads one line from standard input and writes one.
    pub(crate) program: &'static str,
    /// Lines to read and what must be written for each.
    pub(crate) tests: &'static [(&'static str, &'static str)],
}

const SUM: &str = "sum of the numbers from 1 to n";
const SUM_TESTS: &[(&str, &str)] = &[("1", "1"), ("10", "55"), ("100", "5050")];

const REVERSE: &str = "words in reverse order";
const REVERSE_TESTS: &[(&str, &str)] = &[("one two three", "three two one"), ("alone", "alone")];

const GCD: &str = "greatest common divisor";
const GCD_TESTS: &[(&str, &str)] = &[("12 18", "6"), ("17 5", "1"), ("100 75", "25")];

const POLICY: &[Sample] = &[
    Sample { task: SUM, program: "read n; echo $((n * (n + 1) / 2))", tests: SUM_TESTS },
    Sample {
        task: SUM,
        program: "read n; s=0; while [ $n -gt 0 ]; do s=$((s + n)); n=$((n - 1)); done; echo $s",
        tests: SUM_TESTS,
    },
    Sample { task: SUM, program: "read n; echo $((n * n / 2))", tests: SUM_TESTS },
    Sample { task: SUM, program: "read n; until [ $n -eq 0 ]; do sleep 0.1; done", tests: SUM_TESTS },
    Sample {
        task: REVERSE,
        program: "read line; r=; for w in $line; do r=\"$w${r:+ $r}\"; done; echo \"$r\"",
        tests: REVERSE_TESTS,
    },
    Sample { task: REVERSE, program: "read line; if then", tests: REVERSE_TESTS },
    // What it leaves running ends with its sandbox.
    Sample { task: REVERSE, program: "sleep 1000 & setsid sleep 1000 & echo reversed", tests: REVERSE_TESTS },
    Sample {
        task: GCD,
        program: "read a b; while [ $b -ne 0 ]; do t=$((a % b)); a=$b; b=$t; done; echo $a",
        tests: GCD_TESTS,
    },
    Sample { task: GCD, program: "read a b; echo 1", tests: GCD_TESTS },
    // The writable layer is full long before the machine is.
    Sample { task: GCD, program: "dd if=/dev/zero of=/workspace/big bs=1M count=1000", tests: GCD_TESTS },
];

/// Returns `n` answers.
pub(crate) fn samples(n: usize) -> Vec<Sample> {
    POLICY.iter().copied().cycle().take(n).collect()
}
