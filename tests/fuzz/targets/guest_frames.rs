//! What either side of a channel reads: a first byte says which type of frame, a second how the rest is cut into reads.
//!
//! No bytes may panic. However they are cut, the same frames come of them, and what was read is written as no more bytes and
//! read from these as the same again.

#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use prorl_core::{
    frame::{self, Decoder, HEADER_BYTES},
    hello::Greeting,
};
use prorl_sandbox::setup::{Answer, Order, Owned};
use prorl_tools::wire::{GuestFrame, HostFrame};
use serde::{Serialize, de::DeserializeOwned};

fuzz_target!(|data: &[u8]| {
    let [kind, cut, stream @ ..] = data else { return };
    let cut = usize::from(*cut).max(1);
    match kind % 6 {
        0 => read::<GuestFrame>(stream, cut),
        1 => read::<HostFrame>(stream, cut),
        2 => read::<Greeting>(stream, cut),
        3 => read::<Order>(stream, cut),
        4 => read::<Answer>(stream, cut),
        _ => read::<Owned>(stream, cut),
    }
});

fn read<T: Serialize + DeserializeOwned + PartialEq + Debug>(stream: &[u8], cut: usize) {
    let frames = decoded::<T>(stream, cut);
    assert_eq!(frames, decoded::<T>(stream, stream.len().max(1)), "the frames depend on how they were cut");
    let written: Vec<u8> = frames.iter().flat_map(|one| frame::encode(one).expect("it was read")).collect();
    assert!(written.len() <= stream.len(), "{} bytes became {}", stream.len(), written.len());
    assert_eq!(decoded::<T>(&written, cut), frames);
    if let Some(body) = stream.get(HEADER_BYTES..) {
        let _refused = frame::decode::<T>(body);
    }
}

/// Returns the frames before the first that is none.
fn decoded<T: DeserializeOwned>(stream: &[u8], cut: usize) -> Vec<T> {
    let mut decoder = Decoder::default();
    let mut frames = Vec::new();
    for piece in stream.chunks(cut) {
        decoder.push(piece);
        loop {
            match decoder.pop() {
                Ok(Some(one)) => frames.push(one),
                Ok(None) => break,
                Err(_refused) => return frames,
            }
        }
    }
    frames
}
