//! Writing files, on several threads.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    sync::{Arc, mpsc::Receiver},
};

use parking_lot::Mutex;

use super::{
    codec::Decoder,
    fragments::Fragment,
    packed::Fault,
    shared::{NewFile, Shared},
    tables::{DataBlock, PackedSize},
};
use crate::images::{ImageError, notes::Notes};

/// What a thread is given to do.
pub(super) enum Job {
    /// Whole files, most of which have their ends in one fragment.
    Files(Vec<(NewFile, Span)>),
    /// A part of a file that is too large for one thread.
    Part(Arc<OpenFile>, Span),
}

/// A file that several threads write to. Whoever lets go of it last finishes it.
pub(super) struct OpenFile {
    pub(super) file: File,
    pub(super) new: NewFile,
}

/// Consecutive blocks of a file.
pub(super) struct Span {
    /// Length of the whole file, in bytes.
    pub(super) file_len: u64,
    /// Where in the file the first block goes.
    pub(super) offset: u64,
    /// Position of the first block in the image.
    pub(super) at: u64,
    pub(super) sizes: Vec<PackedSize>,
    pub(super) tail: Option<Ending>,
}

/// The last bytes of a file, with the fragment that they are in.
pub(super) struct Ending {
    pub(super) fragment: DataBlock,
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// One of the threads that write files. Its buffers are used again for each block.
pub(super) struct Writer<'a> {
    shared: &'a Shared<'a>,
    decoder: Decoder,
    packed: Vec<u8>,
    block: Vec<u8>,
    /// The fragment that was needed last.
    fragment: Option<(DataBlock, Fragment)>,
    /// Memory for the next one.
    spare: Vec<u8>,
    pub(super) notes: Notes,
}

impl<'a> Writer<'a> {
    pub(super) fn new(shared: &'a Shared<'a>, decoder: Decoder) -> Self {
        let block = vec![0; shared.superblock.block_len];
        Self {
            shared,
            decoder,
            packed: block.clone(),
            block,
            fragment: None,
            spare: Vec::new(),
            notes: Notes::default(),
        }
    }

    /// Works until nothing more is sent. After an error of any thread it only takes what is sent, so that the sender never waits
    /// for a place in the queue.
    pub(super) fn work(mut self, queue: &Mutex<Receiver<Job>>) -> Notes {
        loop {
            // Whoever waits for a job has the lock; the others wait for the lock.
            let next = queue.lock().recv();
            let Ok(job) = next else { return self.notes };
            if self.shared.is_stopped() {
                continue;
            }
            if let Err(error) = self.job(job) {
                self.shared.stop(error);
            }
        }
    }

    fn job(&mut self, job: Job) -> Result<(), ImageError> {
        match job {
            Job::Files(files) => {
                for (new, span) in files {
                    if self.shared.is_stopped() {
                        break;
                    }
                    let file = self.shared.create(&new)?;
                    if span.sizes.iter().any(|size| size.is_hole()) {
                        self.shared.set_len(&file, &new.path, span.file_len)?;
                    }
                    self.fill(&file, &new.path, &span)?;
                    self.shared.finish(&file, &new, &mut self.notes)?;
                }
                Ok(())
            }
            Job::Part(open, span) => {
                self.fill(&open.file, &open.new.path, &span)?;
                match Arc::into_inner(open) {
                    Some(OpenFile { file, new }) => self.shared.finish(&file, &new, &mut self.notes),
                    None => Ok(()),
                }
            }
        }
    }

    fn fill(&mut self, file: &File, path: &[u8], span: &Span) -> Result<(), ImageError> {
        let (mut at, mut offset) = (span.at, span.offset);
        for size in &span.sizes {
            let left = span.file_len - offset;
            let len = usize::try_from(left).map_or(self.block.len(), |left| left.min(self.block.len()));
            if !size.is_hole() {
                if self.shared.is_stopped() {
                    return Ok(());
                }
                self.shared.meter.data(len as u64)?;
                let block = DataBlock { at, size: *size };
                let out = &mut self.block[..len];
                let n_unpacked = unpack(self.shared, &mut self.decoder, &mut self.packed, out, block);
                match n_unpacked {
                    Ok(n_unpacked) if n_unpacked == len => write(self.shared, file, path, out, offset)?,
                    Ok(_) => return Err(self.shared.damaged(path, "has a block that is smaller than it must be")),
                    Err(fault) => return Err(self.shared.damaged(path, fault)),
                }
                at += u64::from(size.len());
            }
            offset += len as u64;
        }
        let Some(Ending { fragment, offset: from, len }) = span.tail else { return Ok(()) };
        self.shared.meter.data(len as u64)?;
        let fragment = self.fragment(fragment).map_err(|fault| self.shared.damaged(path, fault))?;
        let bytes = fragment.get(from..).and_then(|rest| rest.get(..len));
        let bytes = bytes.ok_or_else(|| self.shared.damaged(path, "ends behind the end of its fragment"))?;
        write(self.shared, file, path, bytes, offset)
    }

    /// Returns an unpacked fragment.
    fn fragment(&mut self, block: DataBlock) -> Result<Fragment, Fault> {
        if let Some((_, fragment)) = self.fragment.as_ref().filter(|(last, _)| *last == block) {
            return Ok(Arc::clone(fragment));
        }
        let fragment = match self.shared.fragments.get(block) {
            Some(fragment) => fragment,
            None => self.unpack_fragment(block)?,
        };
        self.fragment = Some((block, Arc::clone(&fragment)));
        Ok(fragment)
    }

    fn unpack_fragment(&mut self, block: DataBlock) -> Result<Fragment, Fault> {
        if block.size.is_hole() {
            return Err("ends in a fragment without bytes".into());
        }
        let mut bytes = std::mem::take(&mut self.spare);
        bytes.resize(self.shared.superblock.block_len, 0);
        let len = unpack(self.shared, &mut self.decoder, &mut self.packed, &mut bytes, block)?;
        bytes.truncate(len);
        let fragment = Arc::new(bytes);
        self.fragment = None;
        self.spare = self.shared.fragments.put(block, Arc::clone(&fragment)).unwrap_or_default();
        Ok(fragment)
    }
}

/// Unpacks a block into the front of `out` and returns its length.
fn unpack(
    shared: &Shared<'_>,
    decoder: &mut Decoder,
    packed: &mut [u8],
    out: &mut [u8],
    block: DataBlock,
) -> Result<usize, Fault> {
    let len = block.size.len() as usize;
    shared.meter.progress.advance(len as u64);
    if block.size.is_raw() {
        shared.packed.read(block.at, out.get_mut(..len).ok_or(TOO_LARGE)?)?;
        return Ok(len);
    }
    let packed = packed.get_mut(..len).ok_or(TOO_LARGE)?;
    shared.packed.read(block.at, packed)?;
    decoder.decode(packed, out)
}

const TOO_LARGE: &str = "has a block that is larger than it may be";

fn write(shared: &Shared<'_>, file: &File, path: &[u8], bytes: &[u8], offset: u64) -> Result<(), ImageError> {
    file.write_all_at(bytes, offset).map_err(|error| ImageError::at("write", shared.place(path), error))
}
