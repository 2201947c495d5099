//! What goes to the terminal: results to standard output, everything else to standard error.

use std::{
    fmt::Display,
    io::{IsTerminal, Write},
    process::ExitCode,
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Writes one line to standard output. A reader that went away is no error: there is nobody left to tell.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Writes one line to standard error.
pub(crate) fn note(line: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Tells a failure with its causes.
pub(crate) fn failure(error: &anyhow::Error) -> ExitCode {
    note(format_args!("error: {error:#}"));
    ExitCode::FAILURE
}

/// Tells wrong usage that the argument parser could not see.
pub(crate) fn usage(problem: impl Display) -> ExitCode {
    note(format_args!("error: {problem}"));
    ExitCode::from(2)
}

/// Starts logging to standard error.
pub(crate) fn start_logging(filter: &str) {
    let filter = tracing_subscriber::EnvFilter::new(filter);
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .try_init();
}

/// Makes a progress bar on standard error; hidden where that is no terminal.
pub(crate) fn progress(len: u64, what: &'static str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{prefix} [{bar:32}] {pos}/{len} {elapsed_precise} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.progress_chars("=> "));
    bar.set_prefix(what);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
