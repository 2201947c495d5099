//! What the figures are meant to be.

use super::{cpu, idle, many, paths, python};
use crate::bench::{
    figures::{Spread, rounded},
    goals::{Goal, Goals},
};

/// The guest and what it may take, in bytes.
const MIB: f64 = 1024.0 * 1024.0;

pub(super) fn of(
    guest_bytes: usize,
    call: &paths::Figures,
    cpu: Option<&cpu::Figures>,
    python: Option<&python::Figures>,
    few: &many::Figures,
    idle: Option<&idle::Figures>,
    many: &many::Figures,
) -> Goals {
    let p50 = |spread: &Option<Spread>| spread.as_ref().map(|spread| spread.p50_ms);
    let pss = idle.and_then(|idle| idle.pss_bytes_each_beyond_bash).map(|bytes| rounded(bytes as f64 / MIB));
    let all = [
        ("true_p50_ms", Goal::at_most(0.2, p50(&call.nothing.ours))),
        ("echo_p50_ms", Goal::at_most(0.2, p50(&call.echo.ours))),
        ("true_by_pty", Goal::at_most(2.0, call.nothing.ours_by_pty)),
        ("echo_by_pty", Goal::at_most(2.0, call.echo.ours_by_pty)),
        ("tmux_by_true", Goal::at_least(100.0, call.nothing.tmux_by_ours)),
        ("seq_200000_p50_ms", Goal::at_most(25.0, p50(&call.seq_200000.ours))),
        ("cpu_s_per_1000", Goal::at_most(0.15, cpu.map(|cpu| cpu.s_per_1000))),
        ("sessions_wrong", Goal::at_most(0.0, Some(few.wrong as f64))),
        ("sessions_commands_per_second", Goal::at_least(5000.0, Some(few.commands_per_second))),
        ("many_wrong", Goal::at_most(0.0, Some(many.wrong as f64))),
        ("many_p99_by_p50", Goal::at_most(20.0, many.p99_by_p50)),
        ("python_value_p50_ms", Goal::at_most(0.45, python.and_then(|python| p50(&python.value.ours)))),
        ("python_megabyte_p50_ms", Goal::at_most(8.0, python.and_then(|python| p50(&python.megabyte.ours)))),
        ("python_start_p50_ms", Goal::at_most(300.0, python.and_then(|python| p50(&python.start.ours)))),
        ("jupyter_by_python_value", Goal::at_least(8.0, python.and_then(|python| python.value.jupyter_by_ours))),
        ("idle_wakeups", Goal::at_most(0.0, idle.map(|idle| idle.wakeups as f64))),
        ("pss_mib_beyond_bash", Goal::at_most(3.0, pss)),
        ("guest_mb", Goal::at_most(3.0, Some(rounded(guest_bytes as f64 / 1e6)))),
    ];
    Goals::new(all.map(|(name, goal)| (name.to_owned(), goal)))
}
