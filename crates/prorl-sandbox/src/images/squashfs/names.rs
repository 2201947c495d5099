//! Lists of names: what is in a folder.

use super::{
    metadata::{Cursor, Metadata},
    packed::{Fault, Numbers},
};

/// Names in one run have inodes in one block; so many there may be.
const MAX_RUN_LEN: u32 = 256;
/// Longest name that the system takes, in bytes.
const MAX_NAME_LEN: usize = 255;

/// A folder's list, read name by name: it may be of any length.
pub(super) struct Listing {
    cursor: Cursor,
    left_bytes: usize,
    /// How many names of the current run are left, and the block of their inodes.
    left_in_run: u32,
    inode_block: u32,
}

impl Listing {
    pub(super) fn new(table: (u64, u64), reference: u64, len: u32) -> Self {
        let cursor = Cursor::new(table, reference);
        Self { cursor, left_bytes: len as usize, left_in_run: 0, inode_block: 0 }
    }

    /// Puts the next name into `name` and returns its inode's reference; or nothing, at the end.
    pub(super) fn next(&mut self, metadata: &mut Metadata<'_>, name: &mut Vec<u8>) -> Result<Option<u64>, Fault> {
        if self.left_in_run == 0 {
            if self.left_bytes == 0 {
                return Ok(None);
            }
            let run = self.array::<12>(metadata)?;
            let mut run = Numbers(&run);
            let (n_more, block) = (run.u32(), run.u32());
            if n_more >= MAX_RUN_LEN {
                return Err(format!("claims {n_more} names in one run").into());
            }
            (self.left_in_run, self.inode_block) = (n_more + 1, block);
        }
        let entry = self.array::<8>(metadata)?;
        let mut entry = Numbers(&entry);
        let (pos, _inode_number, _kind, len) = (entry.u16(), entry.u16(), entry.u16(), entry.u16());
        let len = usize::from(len) + 1;
        if len > MAX_NAME_LEN {
            return Err(format!("holds a name of {len} bytes").into());
        }
        self.take(len)?;
        name.resize(len, 0);
        self.cursor.read(metadata, name)?;
        self.left_in_run -= 1;
        Ok(Some(u64::from(self.inode_block) << 16 | u64::from(pos)))
    }

    fn array<const N: usize>(&mut self, metadata: &mut Metadata<'_>) -> Result<[u8; N], Fault> {
        self.take(N)?;
        self.cursor.array(metadata)
    }

    fn take(&mut self, n_bytes: usize) -> Result<(), Fault> {
        self.left_bytes = self.left_bytes.checked_sub(n_bytes).ok_or("ends within a name")?;
        Ok(())
    }
}
