//! The server from outside: real connections to a real listener, with a handler that does what its instance says.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod auth;
mod backends;
mod body;
mod disconnect;
mod jobs;
mod listeners;
mod service;
mod support;
