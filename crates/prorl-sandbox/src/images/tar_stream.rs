//! Reading a tar as a stream, of whatever dialect, with bounded memory: old and POSIX headers, GNU and PAX long names, PAX
//! attributes, times and sizes, and sparse files of all four GNU forms.

use std::io::{self, Read};

use tar::{EntryType, GnuExtSparseHeader, Header};

use super::{
    part::Part,
    tar_pax::{self, Records},
};

/// Headers and the padding of data are of this size.
const BLOCK: usize = 512;

/// Most bytes of names and attributes that one entry may bring along.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;

/// Most extension headers in front of one entry.
const MAX_EXTENSIONS: usize = 16;

/// Most pieces of data in one sparse file.
const MAX_PIECES: usize = 1 << 18;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryKind {
    File,
    Folder,
    SymbolicLink,
    HardLink,
    Fifo,
    Device,
    /// A kind that no reader makes anything of, with its letter.
    Unknown(u8),
}

/// An entry. Names are as they were written.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) path: Vec<u8>,
    pub(super) kind: EntryKind,
    /// What a link leads to.
    pub(super) target: Vec<u8>,
    pub(super) mode: u32,
    /// Seconds and nanoseconds.
    pub(super) mtime: (i64, u32),
    /// Bytes of the file, holes counted.
    pub(super) size: u64,
    /// Where its data is in the file, in order, for a sparse one.
    pub(super) pieces: Option<Vec<Piece>>,
    /// Where its data is in the tar.
    pub(super) data_pos: u64,
    /// Extended attributes: names and values.
    pub(super) attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A run of bytes in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// A tar that is read from its start to its end.
pub(super) struct TarStream<R> {
    input: R,
    pos: u64,
    /// Data of the current entry that was not read yet, and the padding behind it.
    data_left: u64,
    padding: u64,
}

pub(super) fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem.into())
}

/// What the headers in front of an entry say about it.
#[derive(Default)]
struct Extensions {
    path: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    records: Records,
}

impl<R: Read> TarStream<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, pos: 0, data_left: 0, padding: 0 }
    }

    /// Returns the input, at whatever place it is.
    pub(super) fn into_inner(self) -> R {
        self.input
    }

    /// Returns how much data of the current entry is there to be read.
    pub(super) fn data_left(&self) -> u64 {
        self.data_left
    }

    /// Moves on to the next entry, whose data can be read then. What is left of the current one must have been read.
    pub(super) fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        debug_assert_eq!(self.data_left, 0, "data was left unread");
        let mut extensions = Extensions::default();
        for _ in 0..=MAX_EXTENSIONS {
            let Some(header) = self.header()? else {
                return Ok(None);
            };
            let stored = header.entry_size().map_err(|error| invalid(error.to_string()))?;
            match header.entry_type() {
                EntryType::GNULongName => extensions.path = Some(until_nul(self.extension(stored)?)),
                EntryType::GNULongLink => extensions.target = Some(until_nul(self.extension(stored)?)),
                EntryType::XHeader => tar_pax::parse(&self.extension(stored)?, &mut extensions.records)?,
                // Says things about all that follows which nobody has ever needed, such as a commit's name.
                EntryType::XGlobalHeader => drop(self.extension(stored)?),
                _ => return self.entry(&header, stored, extensions).map(Some),
            }
        }
        Err(invalid(format!("has more than {MAX_EXTENSIONS} extension headers in a row")))
    }

    /// Reads the data of the current entry.
    pub(super) fn read_data(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = usize::try_from(self.data_left).unwrap_or(usize::MAX).min(buffer.len());
        let n_read = self.read_some(&mut buffer[..wanted])?;
        self.data_left -= n_read as u64;
        if n_read == 0 && wanted > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(n_read)
    }

    fn entry(&mut self, header: &Header, stored: u64, extensions: Extensions) -> io::Result<Entry> {
        let Extensions { path, target, records } = extensions;
        let kind = kind_of(header, path.as_deref().or(records.path.as_deref()));
        let stored = match kind {
            EntryKind::File | EntryKind::Unknown(_) => records.size.unwrap_or(stored),
            // Those have no data, whatever they claim, but old archives give hard links the size of their file.
            _ => 0,
        };
        self.begin_data(stored)?;
        let mut entry = Entry {
            path: records.path.or(path).unwrap_or_else(|| header.path_bytes().into_owned()),
            kind,
            target: records
                .target
                .or(target)
                .or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned))
                .unwrap_or_default(),
            mode: header.mode().map_err(|error| invalid(error.to_string()))?,
            // Times before 1970, which only GNU can write here, are of no use to anybody.
            mtime: records.mtime.unwrap_or((header.mtime().ok().and_then(|s| i64::try_from(s).ok()).unwrap_or(0), 0)),
            size: stored,
            pieces: None,
            data_pos: self.pos,
            attributes: records.attributes,
        };
        let sparse = records.sparse;
        if header.entry_type() == EntryType::GNUSparse {
            self.gnu_pieces(header, &mut entry)?;
        } else if sparse.is_version_1 {
            let Some(size) = sparse.size else { return Err(invalid("has a sparse file without a size")) };
            entry.pieces = Some(self.leading_pieces()?);
            entry.size = size;
        } else if let (Some(pieces), Some(size)) = (sparse.pieces, sparse.size) {
            entry.pieces = Some(pieces);
            entry.size = size;
        }
        if let Some(name) = sparse.name {
            entry.path = name;
        }
        self.check_pieces(&entry)?;
        Ok(entry)
    }

    /// Pieces lie in order inside of the file, and are all of the data that is there.
    fn check_pieces(&self, entry: &Entry) -> io::Result<()> {
        let Some(pieces) = &entry.pieces else { return Ok(()) };
        let (mut end, mut n_bytes) = (0_u64, 0_u64);
        for piece in pieces {
            let piece_end = piece.offset.checked_add(piece.len).filter(|_| piece.offset >= end);
            end =
                piece_end.filter(|end| *end <= entry.size).ok_or_else(|| invalid("has a sparse file out of order"))?;
            n_bytes += piece.len;
        }
        if n_bytes != self.data_left {
            return Err(invalid("has a sparse file with more or less data than it says"));
        }
        Ok(())
    }

    /// Reads the rest of the list of pieces of GNU's old form, which begins in the header itself.
    fn gnu_pieces(&mut self, header: &Header, entry: &mut Entry) -> io::Result<()> {
        let gnu = header.as_gnu().ok_or_else(|| invalid("has a sparse file without a list of its pieces"))?;
        let number = |number: io::Result<u64>| number.map_err(|error| invalid(error.to_string()));
        let mut pieces = Vec::new();
        let mut add = |list: &[tar::GnuSparseHeader]| {
            for piece in list.iter().filter(|piece| !piece.is_empty()) {
                pieces.push(Piece { offset: number(piece.offset())?, len: number(piece.length())? });
            }
            if pieces.len() > MAX_PIECES { Err(invalid("has a sparse file of too many pieces")) } else { Ok(()) }
        };
        add(&gnu.sparse)?;
        let mut goes_on = gnu.is_extended();
        while goes_on {
            // These blocks are no part of the entry's size.
            let mut more = GnuExtSparseHeader::new();
            if self.read_full(more.as_mut_bytes())? < more.as_bytes().len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            add(more.sparse())?;
            goes_on = more.is_extended();
        }
        entry.size = number(gnu.real_size())?;
        entry.pieces = Some(pieces);
        entry.data_pos = self.pos;
        Ok(())
    }

    /// Reads the list of pieces that PAX's form 1.0 puts in front of the data: decimal numbers, a line each, padded.
    fn leading_pieces(&mut self) -> io::Result<Vec<Piece>> {
        let mut lines = Lines { block: [0; BLOCK], at: BLOCK };
        let n_pieces = lines.number(self)?;
        if n_pieces > MAX_PIECES as u64 {
            return Err(invalid("has a sparse file of too many pieces"));
        }
        let mut pieces = Vec::new();
        for _ in 0..n_pieces {
            pieces.push(Piece { offset: lines.number(self)?, len: lines.number(self)? });
        }
        Ok(pieces)
    }

    /// Reads the next header, or none at the end: two blocks of zeros, or where nothing follows at all.
    fn header(&mut self) -> io::Result<Option<Header>> {
        let mut skipped = [0; BLOCK];
        let padding = usize::try_from(self.padding).unwrap_or(0);
        if self.read_full(&mut skipped[..padding])? < padding {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.padding = 0;
        let mut header = Header::new_old();
        match self.read_full(header.as_mut_bytes())? {
            0 => return Ok(None),
            BLOCK => {}
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        let bytes = header.as_bytes();
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let sum = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
        // The sum is of the header with blanks in the place of the sum itself.
        let expected = sum(&bytes[..148]) + sum(&bytes[156..]) + 8 * u32::from(b' ');
        // A fuzzer does not find sums, and what lies behind them is to be tried too.
        if header.cksum().ok() != Some(expected) && !cfg!(fuzzing) {
            return Err(invalid(format!("has a header of a wrong checksum at byte {}", self.pos - BLOCK as u64)));
        }
        Ok(Some(header))
    }

    /// Reads the whole data of an extension header.
    fn extension(&mut self, stored: u64) -> io::Result<Vec<u8>> {
        if stored > MAX_EXTENSION_BYTES {
            return Err(invalid(format!("has an extension header of {stored} bytes")));
        }
        self.begin_data(stored)?;
        let mut data = Vec::new();
        let mut chunk = [0; 4096];
        while self.data_left > 0 {
            let n_read = self.read_data(&mut chunk)?;
            data.extend_from_slice(&chunk[..n_read]);
        }
        Ok(data)
    }

    fn begin_data(&mut self, stored: u64) -> io::Result<()> {
        if stored > i64::MAX.unsigned_abs() {
            return Err(invalid(format!("has an entry of {stored} bytes")));
        }
        self.data_left = stored;
        self.padding = stored.next_multiple_of(BLOCK as u64) - stored;
        Ok(())
    }

    /// Reads until the buffer is full or the end is there; returns how much.
    fn read_full(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut n_read = 0;
        while n_read < buffer.len() {
            match self.read_some(&mut buffer[n_read..])? {
                0 => break,
                n_more => n_read += n_more,
            }
        }
        Ok(n_read)
    }

    fn read_some(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.input.read(buffer) {
                Ok(n_read) => {
                    self.pos += n_read as u64;
                    return Ok(n_read);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl TarStream<Part> {
    /// Leaves out the data of the current entry without reading it.
    pub(super) fn skip_data(&mut self) -> io::Result<()> {
        self.input.skip(self.data_left)?;
        self.pos += self.data_left;
        self.data_left = 0;
        Ok(())
    }
}

/// Numbers on lines of their own, in blocks of the current entry's data.
struct Lines {
    block: [u8; BLOCK],
    at: usize,
}

impl Lines {
    fn number<R: Read>(&mut self, tar: &mut TarStream<R>) -> io::Result<u64> {
        let mut number = 0_u64;
        loop {
            if self.at == self.block.len() {
                let mut filled = 0;
                while filled < self.block.len() {
                    match tar.read_data(&mut self.block[filled..])? {
                        0 => return Err(invalid("has a sparse file with half a list of its pieces")),
                        n_read => filled += n_read,
                    }
                }
                self.at = 0;
            }
            let byte = self.block[self.at];
            self.at += 1;
            match byte {
                b'\n' => return Ok(number),
                b'0'..=b'9' => {
                    let more = number.checked_mul(10).and_then(|number| number.checked_add(u64::from(byte - b'0')));
                    number = more.ok_or_else(|| invalid("has a sparse file with an absurd number"))?;
                }
                _ => return Err(invalid("has a sparse file with a wrong list of its pieces")),
            }
        }
    }
}

fn kind_of(header: &Header, long_path: Option<&[u8]>) -> EntryKind {
    match header.entry_type() {
        // Before there were types, a folder was what ended in a slash.
        EntryType::Regular if header.as_ustar().is_none() && header.as_gnu().is_none() => {
            let is_folder = long_path.unwrap_or(&header.path_bytes()).ends_with(b"/");
            if is_folder { EntryKind::Folder } else { EntryKind::File }
        }
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => EntryKind::File,
        EntryType::Directory => EntryKind::Folder,
        EntryType::Symlink => EntryKind::SymbolicLink,
        EntryType::Link => EntryKind::HardLink,
        EntryType::Fifo => EntryKind::Fifo,
        EntryType::Char | EntryType::Block => EntryKind::Device,
        other => EntryKind::Unknown(other.as_byte()),
    }
}

fn until_nul(mut text: Vec<u8>) -> Vec<u8> {
    if let Some(end) = text.iter().position(|byte| *byte == 0) {
        text.truncate(end);
    }
    text
}
