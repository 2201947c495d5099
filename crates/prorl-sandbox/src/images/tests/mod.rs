//! Whole images, from what a test writes to what lies in a store.

mod hostile;
mod layers;
mod registry;
mod sources;
mod support;
