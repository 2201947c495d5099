//! The way out of a sandbox: to hosts that are named, and around nothing.

mod attacks;
mod limits;
mod requests;
mod sandboxes;
mod support;
mod tools;
