//! The public surface: a client, and a real guest at the other end.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod attach;
mod bash;
mod channel;
mod exec;
mod guest;
mod python;
mod toolbox;
