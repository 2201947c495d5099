//! A bounded buffer for output of any length: the beginning, the end, and a count.

use std::collections::VecDeque;

use crate::wire::{Bytes, Captured};

/// Keeps the first and the last bytes of what is pushed.
#[derive(Debug)]
pub(super) struct Capture {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    head_limit: usize,
    tail_limit: usize,
    total: u64,
}

impl Capture {
    /// Returns a buffer that keeps this many bytes of each end.
    pub(super) fn new(head_limit: usize, tail_limit: usize) -> Self {
        Self { head: Vec::new(), tail: VecDeque::new(), head_limit, tail_limit, total: 0 }
    }

    /// Adds bytes; returns those that went to the beginning.
    pub(super) fn push<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        self.total += bytes.len() as u64;
        let (first, rest) = bytes.split_at(bytes.len().min(self.head_limit - self.head.len()));
        self.head.extend_from_slice(first);
        let rest = &rest[rest.len().saturating_sub(self.tail_limit)..];
        let overflow = (self.tail.len() + rest.len()).saturating_sub(self.tail_limit);
        self.tail.drain(..overflow);
        self.tail.extend(rest);
        first
    }

    /// Returns how many bytes were pushed since it began.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Returns what is kept and begins anew, holding no memory.
    pub(super) fn take(&mut self) -> Captured {
        let fresh = Self::new(self.head_limit, self.tail_limit);
        let full = std::mem::replace(self, fresh);
        Captured { head: Bytes(full.head), tail: Bytes(full.tail.into()), total: full.total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_ends_are_kept_however_the_bytes_come(
            bytes in proptest::collection::vec(any::<u8>(), 0..200), piece in 1_usize..50, head in 0_usize..40, tail in 0_usize..40,
        ) {
            let mut capture = Capture::new(head, tail);
            for piece in bytes.chunks(piece) {
                capture.push(piece);
            }
            let captured = capture.take();
            let n_head = head.min(bytes.len());
            let n_tail = tail.min(bytes.len() - n_head);
            prop_assert_eq!(&captured.head.0, &bytes[..n_head]);
            prop_assert_eq!(&captured.tail.0, &bytes[bytes.len() - n_tail..]);
            prop_assert_eq!(captured.total, bytes.len() as u64);
            prop_assert_eq!(capture.take(), Captured::default());
        }
    }
}
