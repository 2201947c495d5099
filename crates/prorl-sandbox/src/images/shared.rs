//! Work that several tasks of this process wait for: it is done once, and ends early when all of them have gone.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, LazyLock, Weak},
};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::{Cancel, ImageError, Progress};
use crate::store::{SourceKey, StoredImage};

/// The store and what is being unpacked into it.
pub(super) type WorkKey = (PathBuf, SourceKey);

/// All work that somebody waits for.
static WORKS: LazyLock<Mutex<HashMap<WorkKey, Weak<Work>>>> = LazyLock::new(Mutex::default);

type Outcome = Result<StoredImage, Arc<ImageError>>;

/// Work, as those see it who wait for it. When the last one has gone it is cancelled.
struct Work {
    key: WorkKey,
    desk: Arc<Desk>,
    is_done: watch::Receiver<bool>,
}

/// What the worker and those who wait share.
struct Desk {
    cancel: Cancel,
    audience: Audience,
    outcome: Mutex<Option<Outcome>>,
}

/// One who waits.
pub(super) struct Ticket {
    work: Arc<Work>,
}

/// What a worker is given.
pub(super) struct Job {
    desk: Arc<Desk>,
    done: watch::Sender<bool>,
}

/// Waits for the work on `key`. If it is not being done yet, the caller gets the job, and must start it.
pub(super) fn join(key: WorkKey, progress: Arc<dyn Progress>) -> (Ticket, Option<Job>) {
    let mut works = WORKS.lock();
    if let Some(work) = works.get(&key).and_then(Weak::upgrade) {
        work.desk.audience.join(progress);
        return (Ticket { work }, None);
    }
    let (done, is_done) = watch::channel(false);
    let desk = Arc::new(Desk { cancel: Cancel::default(), audience: Audience::default(), outcome: Mutex::new(None) });
    desk.audience.join(progress);
    let work = Arc::new(Work { key: key.clone(), desk: Arc::clone(&desk), is_done });
    works.insert(key, Arc::downgrade(&work));
    (Ticket { work }, Some(Job { desk, done }))
}

impl Job {
    /// Does it, on the thread that calls.
    pub(super) fn run(self, work: impl FnOnce(&Cancel, &dyn Progress) -> Result<StoredImage, ImageError>) {
        let outcome = work(&self.desk.cancel, &self.desk.audience);
        *self.desk.outcome.lock() = Some(outcome.map_err(Arc::new));
        // Nobody may be left who waits.
        let _ = self.done.send(true);
    }
}

impl Ticket {
    /// Waits until it is done. Dropping the future gives the ticket back.
    pub(super) async fn wait(self) -> Result<StoredImage, ImageError> {
        let mut is_done = self.work.is_done.clone();
        if is_done.wait_for(|is_done| *is_done).await.is_err() {
            // The runtime ends before the work has begun, or the work has panicked, which was told by then.
            return Err(ImageError::Cancelled);
        }
        // Under this lock nobody joins.
        let works = WORKS.lock();
        let is_alone = Arc::strong_count(&self.work) == 1;
        let mut place = self.work.desk.outcome.lock();
        let outcome = if is_alone { place.take() } else { place.clone() };
        drop((place, works));
        let outcome = outcome.expect("work that is done has an outcome, which the last one takes");
        outcome.map_err(|error| match Arc::try_unwrap(error) {
            Ok(error) => error,
            Err(error) => ImageError::Shared(error),
        })
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.desk.cancel.cancel();
        let mut works = WORKS.lock();
        // The same work may have been begun again meanwhile.
        if works.get(&self.key).is_some_and(|work| work.strong_count() == 0) {
            works.remove(&self.key);
        }
    }
}

/// All who want to know how far the work has come. Who comes late is told what the others know.
#[derive(Default)]
struct Audience(Mutex<Known>);

#[derive(Default)]
struct Known {
    listeners: Vec<Arc<dyn Progress>>,
    part: Option<(String, Option<u64>)>,
    n_bytes: u64,
}

impl Audience {
    fn join(&self, listener: Arc<dyn Progress>) {
        let mut known = self.0.lock();
        if let Some((part, total)) = &known.part {
            listener.begin(part, *total);
            listener.advance(known.n_bytes);
        }
        known.listeners.push(listener);
    }
}

impl Progress for Audience {
    fn begin(&self, part: &str, total: Option<u64>) {
        let mut known = self.0.lock();
        known.part = Some((part.to_owned(), total));
        known.n_bytes = 0;
        known.listeners.iter().for_each(|listener| listener.begin(part, total));
    }

    fn advance(&self, n_bytes: u64) {
        let mut known = self.0.lock();
        known.n_bytes += n_bytes;
        known.listeners.iter().for_each(|listener| listener.advance(n_bytes));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::images::Quiet;

    fn key(name: &str) -> WorkKey {
        (PathBuf::from("/nonexistent"), SourceKey::new(name))
    }

    #[derive(Default)]
    struct Heard(Mutex<Vec<String>>);

    impl Progress for Heard {
        fn begin(&self, part: &str, _total: Option<u64>) {
            self.0.lock().push(part.to_owned());
        }

        fn advance(&self, n_bytes: u64) {
            self.0.lock().push(n_bytes.to_string());
        }
    }

    #[tokio::test]
    async fn work_goes_on_while_one_waits_and_is_cancelled_with_the_last() {
        let (first, job) = join(key("a"), Arc::new(Quiet));
        let job = job.unwrap();
        job.desk.audience.begin("unpack", None);
        job.desk.audience.advance(7);
        let heard = Arc::new(Heard::default());
        let (second, none) = join(key("a"), Arc::clone(&heard) as _);
        assert!(none.is_none());
        assert_eq!(*heard.0.lock(), ["unpack", "7"]);
        drop(first);
        assert!(!job.desk.cancel.is_cancelled());
        drop(second);
        assert!(job.desk.cancel.is_cancelled());
        // The next one does not wait for what nobody wants any more.
        let (_third, again) = join(key("a"), Arc::new(Quiet));
        assert!(again.is_some());
    }

    #[tokio::test]
    async fn one_failure_is_told_to_all_and_the_last_has_it_as_it_is() {
        let (first, job) = join(key("b"), Arc::new(Quiet));
        let (second, _none) = join(key("b"), Arc::new(Quiet));
        let (told, tell) = mpsc::channel();
        let worker = std::thread::spawn(move || {
            job.unwrap().run(|_cancel, _progress| {
                tell.recv().unwrap();
                Err(ImageError::Cancelled)
            });
        });
        told.send(()).unwrap();
        let errors = [first.wait().await.unwrap_err(), second.wait().await.unwrap_err()];
        worker.join().unwrap();
        assert!(matches!(&errors[0], ImageError::Shared(error) if matches!(**error, ImageError::Cancelled)));
        assert_eq!(errors[0].to_string(), errors[1].to_string());
        assert!(!WORKS.lock().contains_key(&key("b")));
    }
}
