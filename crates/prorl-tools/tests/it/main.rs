//! The public surface: a client, and a real guest at the other end.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod attach;
mod bash;
mod channel;
#[cfg(feature = "conformance")]
mod conformance;
mod edges;
mod editor;
mod exec;
mod files;
mod guest;
mod python;
mod rich;
mod toolbox;
