//! Metadata: a stream of bytes in compressed blocks of at most 8 KiB, read from any of them on.

use std::rc::Rc;

use super::{
    codec::Decoder,
    packed::{Fault, Numbers, Packed},
};

/// Largest block, in bytes.
const BLOCK_LEN: usize = 8192;
/// Set in a block's two-byte header where it is not compressed.
const RAW: u16 = 0x8000;
/// How many unpacked blocks are remembered: 1 MiB of them.
const N_CACHED: usize = 128;

/// What reads blocks of metadata, and remembers the last ones.
pub(super) struct Metadata<'a> {
    packed: &'a Packed<'a>,
    decoder: Decoder,
    cached: Vec<Cached>,
    now: u64,
    buf: Box<[u8; BLOCK_LEN]>,
}

struct Cached {
    at: u64,
    used: u64,
    block: Rc<Block>,
}

struct Block {
    bytes: Box<[u8]>,
    /// Position of the next one.
    next: u64,
}

impl<'a> Metadata<'a> {
    pub(super) fn new(packed: &'a Packed<'a>, decoder: Decoder) -> Self {
        Self { packed, decoder, cached: Vec::with_capacity(N_CACHED), now: 0, buf: Box::new([0; BLOCK_LEN]) }
    }

    /// Fills `buf` from a position of the image that is no metadata.
    pub(super) fn read_plain(&self, at: u64, buf: &mut [u8]) -> Result<(), Fault> {
        self.packed.read(at, buf)
    }

    fn block(&mut self, at: u64) -> Result<Rc<Block>, Fault> {
        self.now += 1;
        if let Some(cached) = self.cached.iter_mut().find(|cached| cached.at == at) {
            cached.used = self.now;
            return Ok(Rc::clone(&cached.block));
        }
        let block = Rc::new(self.unpack(at)?);
        let cached = Cached { at, used: self.now, block: Rc::clone(&block) };
        if self.cached.len() < N_CACHED {
            self.cached.push(cached);
        } else if let Some(oldest) = self.cached.iter_mut().min_by_key(|cached| cached.used) {
            *oldest = cached;
        }
        Ok(block)
    }

    fn unpack(&mut self, at: u64) -> Result<Block, Fault> {
        let mut header = [0; 2];
        self.packed.read(at, &mut header)?;
        let header = u16::from_le_bytes(header);
        let len = usize::from(header & !RAW);
        if len == 0 || len > BLOCK_LEN {
            return Err(format!("has {len} bytes of metadata in one block").into());
        }
        let packed = &mut self.buf[..len];
        self.packed.read(at + 2, packed)?;
        let bytes = if header & RAW != 0 {
            Box::from(&*packed)
        } else {
            let mut bytes = [0; BLOCK_LEN];
            let len = self.decoder.decode(packed, &mut bytes)?;
            if len == 0 {
                return Err("has no bytes in a block of metadata".into());
            }
            Box::from(&bytes[..len])
        };
        Ok(Block { bytes, next: at + 2 + len as u64 })
    }
}

/// A place in a stream of metadata, from which reading goes on.
pub(super) struct Cursor {
    /// Position of the block, or of the next one once this one is read.
    at: u64,
    /// Where the table ends that the stream belongs to.
    end: u64,
    /// The block, once it was needed.
    block: Option<Rc<Block>>,
    pos: usize,
}

impl Cursor {
    /// Makes one for the table between positions `table`, by a reference into it: of a block, in the upper 48 bits, counted from
    /// the table's start, and of a byte in the unpacked block, in the lower 16.
    pub(super) fn new(table: (u64, u64), reference: u64) -> Self {
        let pos = usize::from((reference & 0xffff) as u16);
        Self { at: table.0.saturating_add(reference >> 16), end: table.1, block: None, pos }
    }

    /// Fills `buf`.
    pub(super) fn read(&mut self, metadata: &mut Metadata<'_>, mut buf: &mut [u8]) -> Result<(), Fault> {
        while !buf.is_empty() {
            let (block, range) = self.next_bytes(metadata, buf.len())?;
            let (now, later) = buf.split_at_mut(range.len());
            now.copy_from_slice(&block.bytes[range]);
            buf = later;
        }
        Ok(())
    }

    /// Reads a structure of numbers.
    pub(super) fn array<const N: usize>(&mut self, metadata: &mut Metadata<'_>) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.read(metadata, &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self, metadata: &mut Metadata<'_>) -> Result<u32, Fault> {
        Ok(Numbers(&self.array::<4>(metadata)?).u32())
    }

    /// Passes over so many bytes.
    pub(super) fn skip(&mut self, metadata: &mut Metadata<'_>, mut n_bytes: usize) -> Result<(), Fault> {
        while n_bytes > 0 {
            n_bytes -= self.next_bytes(metadata, n_bytes)?.1.len();
        }
        Ok(())
    }

    /// Takes at most so many of the next bytes, at least one, from the block that they are in.
    fn next_bytes(
        &mut self,
        metadata: &mut Metadata<'_>,
        most: usize,
    ) -> Result<(Rc<Block>, std::ops::Range<usize>), Fault> {
        let block = match &self.block {
            Some(block) => Rc::clone(block),
            None if self.at >= self.end => return Err("runs past the end of its table".into()),
            None => metadata.block(self.at)?,
        };
        let left = block.bytes.len().checked_sub(self.pos).filter(|left| *left > 0);
        let len = most.min(left.ok_or("points behind the end of a block of metadata")?);
        let range = self.pos..self.pos + len;
        if range.end == block.bytes.len() {
            (self.at, self.pos, self.block) = (block.next, 0, None);
        } else {
            (self.pos, self.block) = (range.end, Some(Rc::clone(&block)));
        }
        Ok((block, range))
    }
}
