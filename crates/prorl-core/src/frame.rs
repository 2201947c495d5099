//! The bytes of one frame between guest and host: a length, then bincode. No I/O.
//!
//! `u32` length in little-endian order, then that many bytes of bincode 2 (standard configuration) of a plain type. A frame
//! has types of its own: bincode decodes neither JSON values nor skipped fields. The other side may be hostile, so a
//! [`Decoder`] has a limit, never allocates for a length that was only announced, and reports garbage as an error.

use serde::{Serialize, de::DeserializeOwned};

/// The largest frame body that either side sends or takes, in bytes.
pub const MAX_FRAME_BYTES: usize = 4 * 1024 * 1024;

/// The length in front of each frame, in bytes.
pub const HEADER_BYTES: usize = 4;

/// Why bytes are no frame.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The announced length is above [`MAX_FRAME_BYTES`].
    #[error("frame of {len} bytes is above the limit of {MAX_FRAME_BYTES}")]
    TooLarge {
        /// The announced or produced length.
        len: usize,
    },
    /// The body is not the expected type.
    #[error("frame body does not decode")]
    Decode(#[source] bincode::error::DecodeError),
    /// The body decodes but bytes are left over.
    #[error("frame has {extra} bytes after its value")]
    Trailing {
        /// How many are left.
        extra: usize,
    },
    /// The value has no bincode form.
    #[error("value does not encode")]
    Encode(#[source] bincode::error::EncodeError),
}

/// Room for a frame that has no content to speak of, and for what is around some.
const SMALL_BYTES: usize = 256;

/// What a [`Decoder`] holds on to once it is empty.
const KEPT_BYTES: usize = 128 * 1024;

const CONFIG: bincode::config::Configuration<
    bincode::config::LittleEndian,
    bincode::config::Varint,
    bincode::config::Limit<MAX_FRAME_BYTES>,
> = bincode::config::standard().with_limit::<MAX_FRAME_BYTES>();

/// Returns the whole frame of `value`, header included.
///
/// # Errors
/// [`FrameError::TooLarge`] above the limit; [`FrameError::Encode`] for a value that bincode cannot hold.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, FrameError> {
    encode_sized(value, 0)
}

/// Returns the whole frame of a value that has about `content_bytes` of content, which spares copies while it is made.
///
/// # Errors
/// As [`encode`].
pub fn encode_sized<T: Serialize>(value: &T, content_bytes: usize) -> Result<Vec<u8>, FrameError> {
    let mut frame = Vec::with_capacity(content_bytes.min(MAX_FRAME_BYTES) + SMALL_BYTES);
    frame.resize(HEADER_BYTES, 0);
    bincode::serde::encode_into_std_write(value, &mut frame, bincode::config::standard())
        .map_err(FrameError::Encode)?;
    let len = frame.len() - HEADER_BYTES;
    let header = u32::try_from(len).ok().filter(|_| len <= MAX_FRAME_BYTES).ok_or(FrameError::TooLarge { len })?;
    frame[..HEADER_BYTES].copy_from_slice(&header.to_le_bytes());
    Ok(frame)
}

/// Returns the length of the body that a header announces.
///
/// # Errors
/// [`FrameError::TooLarge`] above the limit.
pub fn body_len(header: [u8; HEADER_BYTES]) -> Result<usize, FrameError> {
    let len = u32::from_le_bytes(header) as usize;
    if len > MAX_FRAME_BYTES { Err(FrameError::TooLarge { len }) } else { Ok(len) }
}

/// Decodes one body.
///
/// # Errors
/// [`FrameError::Decode`] when it is not a `T`, [`FrameError::Trailing`] when bytes follow.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    let (value, read) = bincode::serde::decode_from_slice(body, CONFIG).map_err(FrameError::Decode)?;
    match body.len() - read {
        0 => Ok(value),
        extra => Err(FrameError::Trailing { extra }),
    }
}

/// Cuts a byte stream into frames. It holds what has come of one frame, and little else once that was taken.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
}

impl Decoder {
    /// Appends bytes as they were read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 && self.start * 2 >= self.buffer.len() {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next whole frame's value, or `None` until more bytes are there.
    ///
    /// # Errors
    /// As [`body_len`] and [`decode`]. The stream is of no use afterwards.
    pub fn pop<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let Some(header) = self.buffer[self.start..].first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let len = body_len(*header)?;
        let body_start = self.start + HEADER_BYTES;
        let Some(body) = self.buffer.get(body_start..body_start + len) else { return Ok(None) };
        let value = decode(body)?;
        self.start = body_start + len;
        if self.is_empty() {
            self.buffer.clear();
            self.buffer.shrink_to(KEPT_BYTES);
            self.start = 0;
        }
        Ok(Some(value))
    }

    /// Tells whether bytes of an unfinished frame are held.
    pub fn is_empty(&self) -> bool {
        self.start == self.buffer.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_survive_any_cutting(values in proptest::collection::vec((any::<u64>(), ".{0,40}", proptest::collection::vec(any::<u8>(), 0..300)), 0..8), cut in 1_usize..64) {
            let stream: Vec<u8> = values.iter().flat_map(|value| encode(value).unwrap()).collect();
            let mut decoder = Decoder::default();
            let mut out = Vec::new();
            for piece in stream.chunks(cut) {
                decoder.push(piece);
                while let Some(value) = decoder.pop::<(u64, String, Vec<u8>)>().unwrap() {
                    out.push(value);
                }
            }
            prop_assert_eq!(out, values);
            prop_assert!(decoder.is_empty());
        }

        #[test]
        fn garbage_is_an_error_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.pop::<(u64, String, Vec<String>)>() {}
        }
    }

    #[test]
    fn a_large_frame_leaves_no_memory_behind() {
        let mut decoder = Decoder::default();
        let large = vec![7_u8; MAX_FRAME_BYTES - 8];
        for _ in 0..2 {
            for piece in encode(&large).unwrap().chunks(64 * 1024) {
                decoder.push(piece);
            }
            assert_eq!(decoder.pop::<Vec<u8>>().unwrap().as_ref(), Some(&large));
            assert!(decoder.buffer.capacity() <= KEPT_BYTES, "{}", decoder.buffer.capacity());
        }
    }

    #[test]
    fn an_announced_length_is_not_believed() {
        let mut decoder = Decoder::default();
        decoder.push(&u32::MAX.to_le_bytes());
        assert!(matches!(decoder.pop::<u8>(), Err(FrameError::TooLarge { .. })));
        // A vector that claims 2^60 entries inside a small frame must not be allocated.
        let claim = [&[253_u8][..], &(1_u64 << 60).to_le_bytes()].concat();
        assert!(decode::<Vec<u64>>(&claim).is_err());
        assert!(encode(&vec![0_u8; MAX_FRAME_BYTES + 1]).is_err());
    }
}
