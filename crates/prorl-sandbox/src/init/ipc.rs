//! What System V objects may take: shared memory, semaphores and messages, which are in no file system and, while nobody
//! uses them, in no process.

use std::fs;

/// Message queues, of 16 KiB each.
const QUEUES: u32 = 32;

/// Semaphores: in a set, together, operations at once, sets.
const SEMAPHORES: &str = "250 32000 32 128";

/// Tells the kernel in `folder`, the settings of this IPC namespace, how much there may be: as much shared memory as in
/// `/dev/shm`, and what is enough for anybody of the rest. Tells whether the kernel has taken all of that, as it does from a
/// namespace's root in new kernels only.
pub(super) fn limit(folder: &str, shared_bytes: u64) -> bool {
    let pages = (shared_bytes / 4096).to_string();
    let settings = [("shmall", pages), ("msgmni", QUEUES.to_string()), ("sem", SEMAPHORES.to_owned())];
    settings.into_iter().all(|(name, value)| fs::write(format!("{folder}/{name}"), value).is_ok())
}
