//! Nodes, through what embedders see of them. Works as root and as an ordinary user; what needs something absent says so.
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod crash;
mod hidden;
mod open;
mod sandboxes;
mod support;
