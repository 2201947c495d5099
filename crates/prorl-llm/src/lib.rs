#![doc = include_str!("../README.md")]

pub mod dialect;
mod http;
pub mod ledger;
#[cfg(feature = "mock")]
pub mod mock;
pub mod parse;
pub mod pool;
pub mod tokenizer;
pub mod verify;
