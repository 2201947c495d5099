//! What keeps programs on a terminal from waiting for a person.

use std::process::Command;

/// Variables without which programs open a pager or an editor, or ask. Those of the image do not count: it was made for a person,
/// and cannot be told from the job's, which a command of the task sets as well.
const QUIET: [(&str, &str); 12] = [
    ("PAGER", "cat"),
    ("GIT_PAGER", "cat"),
    ("MANPAGER", "cat"),
    ("SYSTEMD_PAGER", "cat"),
    ("BAT_PAGER", "cat"),
    ("EDITOR", "true"),
    ("VISUAL", "true"),
    ("GIT_EDITOR", "true"),
    ("GIT_SEQUENCE_EDITOR", "true"),
    ("GIT_TERMINAL_PROMPT", "0"),
    ("DEBIAN_FRONTEND", "noninteractive"),
    ("PIP_NO_INPUT", "1"),
];

/// Sets them.
pub(super) fn quiet(command: &mut Command) {
    command.envs(QUIET);
}
