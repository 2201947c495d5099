#![doc = include_str!("../README.md")]

mod auth;
mod config;
mod explain;
mod extract;
mod listen;
mod problem;
mod routes;
mod server;
mod state;
mod stream;

pub use config::ServerConfig;
pub use listen::{InvalidListen, Listen};
pub use routes::router;
pub use server::{Error, Server};
pub use state::AppState;
