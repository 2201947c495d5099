//! The public surface of `prorl-sandbox`, on real sandboxes. Works as root and as an ordinary user; what needs root says so.
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod build;
mod contract;
mod egress;
mod escape;
mod fakeroot;
mod layers;
mod life;
mod limits;
mod neighbours;
mod refusals;
mod rlimits;
mod scale;
mod singularity;
mod support;
mod walls;
mod watch;
mod watch_memory;
