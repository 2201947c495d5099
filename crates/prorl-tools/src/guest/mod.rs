//! The guest's side: the tools themselves, inside the sandbox. Threads and `poll`, no tokio, so that the program stays small.
//!
//! The thread that calls [`serve`] reads requests. A bash session, a Python session and an exec have a thread each, which
//! sleeps in one `poll` over all that can happen to it; whichever thread has something to say writes the frame itself.
//! Nothing polls in a loop and nothing sleeps for order: an idle guest does not wake up, but for a terminal whose input has
//! ended.

mod attach;
mod bash;
mod capture;
mod clock;
mod editor;
mod exec;
mod feed;
mod files;
mod left;
mod limits;
mod post;
mod probe;
mod procs;
mod pty;
mod python;
mod quiet;
mod reaper;
mod script;
mod serve;
mod shell;
mod sys;
mod tree;
mod wait;

pub use limits::TaskLimits;
pub use probe::{Programs, probe};
pub use serve::{Terms, serve};
