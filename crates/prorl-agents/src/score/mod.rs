//! Scorers: what an answer is worth.
//!
//! A scorer compares texts. It starts nothing, opens nothing and never evaluates what the policy wrote, so that its
//! verdict is a pure function of the answer and the ground truth.

pub mod math;
