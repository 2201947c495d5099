//! Handlers with real sandboxes and a scripted policy.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod egress;
mod images;
mod setup;
mod support;
