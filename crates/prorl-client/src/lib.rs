#![doc = include_str!("../README.md")]

mod client;
mod error;
mod wire;

pub use client::Client;
pub use error::ClientError;
pub use wire::{AddBackend, Added, BackendKind, CancelRequested, JobView, Stopped, Submitted};
