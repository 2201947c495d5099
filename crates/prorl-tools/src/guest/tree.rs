//! Files and folders in and out, as records that are streamed.

use std::path::Path;

use super::{
    feed::WINDOW_BYTES,
    files::Watch,
    post::{Mailbox, Post},
    serve::Shared,
};
use crate::{
    tree::{IfPresent, OutsideLinks, TreeError, TreeLimits, TreeReader, TreeWriter},
    wire::{Answer, Download, GuestFrame, Steer, Stream, TreeSummary, Upload},
};

pub(super) fn upload(shared: &Shared, mailbox: &Mailbox, id: u64, timeout_ms: u64, upload: &Upload) {
    let post = &shared.post;
    // The kernel holds tasks to this and not the guest. How much there is in all is for the host to decide, and for the disk.
    let max_file_bytes = shared.terms.limits.file_bytes.unwrap_or(u64::MAX);
    let outside_links = OutsideLinks::Keep;
    let limits = TreeLimits { max_bytes: u64::MAX, max_file_bytes, max_entries: u64::MAX, outside_links };
    match take(post, &Watch::new(mailbox, timeout_ms), id, upload, limits) {
        Ok(summary) => post.done(id, Answer::Tree(summary)),
        Err(message) => post.failed(id, format!("cannot take in {}: {message}", upload.to)),
    }
}

fn take(post: &Post, watch: &Watch<'_>, id: u64, upload: &Upload, limits: TreeLimits) -> Result<TreeSummary, String> {
    let told = |err: TreeError| err.told();
    let if_present = if upload.replace { IfPresent::Replace } else { IfPresent::Refuse };
    let mut writer = TreeWriter::begin(Path::new(&upload.to), if_present, limits).map_err(told)?;
    post.send(&GuestFrame::Credit { id, bytes: WINDOW_BYTES });
    let mut owed = 0;
    loop {
        for steer in watch.wait()? {
            match steer {
                Steer::Input(bytes) => {
                    writer.push(&bytes.0).map_err(told)?;
                    owed += bytes.0.len() as u64;
                }
                Steer::Close(Stream::Stdin) => return writer.finish().map_err(told),
                // Of no use here.
                Steer::Close(_) | Steer::Credit { .. } | Steer::Resize(_) | Steer::Signal(_) => {}
            }
        }
        if owed >= WINDOW_BYTES / 4 {
            post.send(&GuestFrame::Credit { id, bytes: std::mem::take(&mut owed) });
        }
    }
}

pub(super) fn download(shared: &Shared, mailbox: &Mailbox, id: u64, timeout_ms: u64, download: &Download) {
    let post = &shared.post;
    match give(post, &Watch::new(mailbox, timeout_ms), id, download) {
        Ok(summary) => post.done(id, Answer::Tree(summary)),
        Err(message) => post.failed(id, format!("cannot send {}: {message}", download.from)),
    }
}

fn give(post: &Post, watch: &Watch<'_>, id: u64, download: &Download) -> Result<TreeSummary, String> {
    let told = |err: TreeError| err.told();
    let Download { max_bytes, max_entries, .. } = *download;
    let outside_links = OutsideLinks::Keep; // the receiver decides
    let limits = TreeLimits { max_bytes, max_file_bytes: max_bytes, max_entries, outside_links };
    let mut reader = TreeReader::open(Path::new(&download.from), limits).map_err(told)?;
    let mut credit = download.window;
    while let Some(piece) = reader.next_piece().map_err(told)? {
        let mut rest = piece.as_slice();
        while !rest.is_empty() {
            for steer in if credit == 0 { watch.wait()? } else { watch.look()? } {
                match steer {
                    Steer::Credit { stream: Stream::Stdout, bytes } => credit = credit.saturating_add(bytes),
                    Steer::Close(Stream::Stdout) => return Err("nobody reads it".to_owned()),
                    // Of no use here.
                    Steer::Credit { .. } | Steer::Close(_) | Steer::Input(_) | Steer::Resize(_) | Steer::Signal(_) => {}
                }
            }
            let n_sent = rest.len().min(usize::try_from(credit).unwrap_or(usize::MAX));
            post.output(id, Stream::Stdout, &rest[..n_sent]);
            credit -= n_sent as u64;
            rest = &rest[n_sent..];
        }
    }
    Ok(reader.summary())
}
