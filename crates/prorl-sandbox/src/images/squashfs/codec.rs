//! Decompression of single blocks. How large a block may become is always known, so that no image can ask for more.

use std::io::{self, Read as _};

use flate2::{Decompress, FlushDecompress, Status};

use super::packed::Fault;

/// How an image is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codec {
    Gzip,
    Xz,
    Lz4,
    Zstd,
}

impl Codec {
    /// Looks it up by its number in the superblock.
    pub(super) fn of(number: u16) -> Result<Self, Fault> {
        let unknown = match number {
            1 => return Ok(Self::Gzip),
            4 => return Ok(Self::Xz),
            5 => return Ok(Self::Lz4),
            6 => return Ok(Self::Zstd),
            2 => "lzma".to_owned(),
            3 => "lzo".to_owned(),
            other => format!("number {other}"),
        };
        let known = "pack it again with one of gzip, zstd, xz and lz4";
        Err(format!("names the compression {unknown}, which is not supported; {known}").into())
    }

    /// Makes what decompresses one block after the other.
    pub(super) fn decoder(self) -> io::Result<Decoder> {
        Ok(match self {
            Self::Gzip => Decoder::Gzip(Decompress::new(true)),
            Self::Xz => Decoder::Xz,
            Self::Lz4 => Decoder::Lz4,
            Self::Zstd => Decoder::Zstd(zstd::bulk::Decompressor::new()?),
        })
    }
}

/// Memory that decompressing a block of xz may take, in KiB. A dictionary larger than a block, of at most 1 MiB, is of no use.
const XZ_MEMORY_KIB: u32 = 8 << 10;

/// What decompresses blocks of one kind, one at a time.
pub(super) enum Decoder {
    Gzip(Decompress),
    Xz,
    Lz4,
    Zstd(zstd::bulk::Decompressor<'static>),
}

impl Decoder {
    /// Decompresses a block into the front of `out` and returns its length. A block that does not fit is damaged.
    pub(super) fn decode(&mut self, packed: &[u8], out: &mut [u8]) -> Result<usize, Fault> {
        let wrong = "cannot be decompressed";
        match self {
            Self::Gzip(stream) => {
                stream.reset(true);
                let status = stream.decompress(packed, out, FlushDecompress::Finish).map_err(|_bad| wrong)?;
                if status != Status::StreamEnd {
                    return Err(wrong.into());
                }
                usize::try_from(stream.total_out()).map_err(|_larger_than_out| wrong.into())
            }
            Self::Xz => {
                let mut stream = lzma_rust2::XzReader::new_mem_limit(packed, false, XZ_MEMORY_KIB);
                let mut len = 0;
                loop {
                    // Once `out` is full, a last read of one byte tells whether the block ends there.
                    let mut more = [0];
                    let is_full = len == out.len();
                    let place = if is_full { &mut more[..] } else { &mut out[len..] };
                    match stream.read(place) {
                        Ok(0) => return Ok(len),
                        Ok(_) if is_full => return Err(wrong.into()),
                        Ok(n) => len += n,
                        Err(_bad) => return Err(wrong.into()),
                    }
                }
            }
            Self::Lz4 => lz4_flex::block::decompress_into(packed, out).map_err(|_bad| wrong.into()),
            Self::Zstd(context) => context.decompress_to_buffer(packed, out).map_err(|_bad| wrong.into()),
        }
    }
}
