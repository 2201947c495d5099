//! A conformance suite for tools of agents: what bash, a Python interpreter and an editor must do, as data, and a runner that holds
//! any implementation to it.
//!
//! The cases are in `conformance/*.toml` of this crate. An implementation is a [`Subject`]: ours behind a channel ([`Ours`]),
//! [`BashC`], or any program that speaks the small protocol of an [`Adapter`]. Each case meets a [`Session`] of its own.
//!
//! Outputs are compared without newlines at their end, and `\r\n` is taken for `\n`: an implementation that trims its output, or
//! leaves a terminal as it is, passes all the same.

mod adapter;
mod bash_c;
mod case;
mod host;
mod ours;
mod report;
mod run;

pub use adapter::Adapter;
pub use bash_c::BashC;
pub use case::{Call, Case, Content, Expect, File, InvalidCase, Need, State, Step, Suite, What};
pub use ours::Ours;
pub use report::{Mark, Report, Results};
pub use run::{Found, Outcome, Seen, Session, Shape, Subject, Unopened, Verdict, judge, run};
