//! The public surface of prorl-llm.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod encoding;
#[cfg(feature = "mock")]
mod engines;
mod ledger;
#[cfg(feature = "mock")]
mod pool;
mod support;
mod verify;
