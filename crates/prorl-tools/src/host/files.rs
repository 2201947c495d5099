//! Files and folders in and out, as records that are streamed and checked.

use std::{panic::resume_unwind, path::Path, time::Duration};

use tokio::time::timeout;

use super::{
    attach::{Outputs, WINDOW_BYTES},
    client::{ANSWER_GRACE, ToolClient, ToolError, wrong},
};
use crate::{
    tree::{IfPresent, TreeError, TreeLimits, TreeReader, TreeWriter},
    wire::{Answer, Download, Op, TreeSummary, Upload},
};

/// What a file or folder may be, and what becomes of what is where it goes.
#[derive(Clone, Copy, Debug)]
pub struct TreeOptions {
    /// What becomes of files that are there already.
    pub if_present: IfPresent,
    /// What may come over.
    pub limits: TreeLimits,
}

impl Default for TreeOptions {
    /// Returns that nothing is replaced, and the limits that [`TreeLimits`] has.
    fn default() -> Self {
        Self { if_present: IfPresent::Refuse, limits: TreeLimits::default() }
    }
}

impl ToolClient {
    /// Sends a file or folder of this machine to the path `to` in the sandbox. Folders above it are made. Where a folder is
    /// already, the one that is sent is put into it.
    ///
    /// All of it is there in the end, or nothing: it is moved to its place once its SHA-256 was found right.
    ///
    /// # Errors
    /// [`ToolError::Tree`] when it cannot be read here; [`ToolError::Failed`] when it cannot be made there, in words.
    ///
    /// # Cancel safety
    /// Dropping the call has the guest remove what has come.
    pub async fn upload(
        &self,
        from: &Path,
        to: &str,
        options: &TreeOptions,
        limit: Duration,
    ) -> Result<TreeSummary, ToolError> {
        let (from, limits) = (from.to_owned(), options.limits);
        let op = Op::Upload(Upload { to: to.to_owned(), replace: options.if_present == IfPresent::Replace });
        let work = async {
            let mut reader = blocking(move || TreeReader::open(&from, limits)).await?;
            let mut attached = self.open(op, Outputs::One, limit).await?;
            loop {
                let (again, piece) = blocking(move || reader.next_piece().map(|piece| (reader, piece))).await?;
                reader = again;
                let (Some(piece), Some(input)) = (piece, &mut attached.stdin) else { break };
                match input.write(&piece).await {
                    Ok(()) => {}
                    // The answer says why.
                    Err(ToolError::InputClosed) => break,
                    Err(err) => return Err(err),
                }
            }
            drop(attached.stdin.take());
            match attached.answer().await? {
                Answer::Tree(made) if made == reader.summary() => Ok(made),
                other => Err(wrong(other)),
            }
        };
        within(limit, work).await
    }

    /// Fetches the file or folder that has the path `from` in the sandbox, to `to` on this machine. Folders above it are made.
    /// Where a folder is already, the one that is fetched is put into it.
    ///
    /// The sandbox may send whatever it likes: nothing is made but below `to`, no more than the limits say, and no link unless
    /// it stays inside or was asked for. All of it is there in the end, or nothing.
    ///
    /// # Errors
    /// [`ToolError::Failed`] when it cannot be read there, in words; [`ToolError::Tree`] when it cannot be made here.
    ///
    /// # Cancel safety
    /// Dropping the call removes what has come, at once or as soon as what is being written is.
    pub async fn download(
        &self,
        from: &str,
        to: &Path,
        options: &TreeOptions,
        limit: Duration,
    ) -> Result<TreeSummary, ToolError> {
        let (to, TreeOptions { if_present, limits }) = (to.to_owned(), *options);
        let TreeLimits { max_bytes, max_entries, .. } = limits;
        let op = Op::Download(Download { from: from.to_owned(), max_bytes, max_entries, window: WINDOW_BYTES });
        let work = async {
            let mut writer = blocking(move || TreeWriter::begin(&to, if_present, limits)).await?;
            let mut attached = self.open(op, Outputs::One, limit).await?;
            if let Some(output) = &mut attached.stdout {
                while let Some(bytes) = output.next().await {
                    writer = blocking(move || writer.push(&bytes).map(|()| writer)).await?;
                }
            }
            match attached.answer().await? {
                Answer::Tree(_) => blocking(move || writer.finish()).await,
                other => Err(wrong(other)),
            }
        };
        within(limit, work).await
    }
}

async fn within<T>(limit: Duration, work: impl Future<Output = Result<T, ToolError>>) -> Result<T, ToolError> {
    let waited = limit.saturating_add(ANSWER_GRACE);
    timeout(waited, work).await.unwrap_or(Err(ToolError::NoAnswer { waited }))
}

/// Works on files apart from the threads of other tasks.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, TreeError> + Send + 'static,
) -> Result<T, ToolError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(ToolError::Tree),
        Err(err) if err.is_panic() => resume_unwind(err.into_panic()),
        Err(_) => Err(ToolError::ChannelClosed { reason: "the program ends".to_owned() }),
    }
}
