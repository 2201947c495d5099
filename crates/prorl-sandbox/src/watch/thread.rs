//! The threads, and when they look at what.
//!
//! One looks at all sandboxes, as long as it takes hardly any time. What takes longer is left to others, a few of them however many
//! sandboxes there are, which do it in turn.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use nix::{
    sys::time::TimeValLike as _,
    time::{ClockId, clock_gettime},
};
use parking_lot::{Condvar, Mutex};
use tokio::time::Instant;

use super::{
    disk::Files,
    machine::{Machine, News},
    memory::Pace,
    post::Post,
};

/// What the threads are called and how they look; the kernel keeps 15 letters.
pub(super) const THREADS: [(&str, Pace); 3] =
    [("prorl-watch", Pace::Quick), ("prorl-watch-1", Pace::Slow), ("prorl-watch-2", Pace::Slow)];

/// The longest that a sandbox is not looked at.
pub(super) const LONGEST: Duration = Duration::from_millis(100);

/// How long the end of the threads is waited for.
const END: Duration = Duration::from_secs(1);

/// The beats at which sandboxes are looked at, in milliseconds. One waking serves all that have the same.
const BEATS: [u64; 7] = [100, 50, 25, 10, 5, 2, 1];

/// What the threads share with each other and with those who start and end sandboxes.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// That there is something slow to do, or that all is over.
    is_slow: Condvar,
    pub(super) cpu_nanos: AtomicU64,
    /// When all beats began.
    origin: Instant,
}

#[derive(Debug, Default)]
struct State {
    watched: HashMap<u64, Place>,
    /// When to look next. What is not watched any more may be among them.
    due: BinaryHeap<Reverse<(Instant, u64)>>,
    /// What is due and takes long.
    slow: VecDeque<(u64, Box<Post>)>,
    next_id: u64,
    is_closed: bool,
    /// How many threads there are that may look at something.
    n_threads: usize,
}

/// A sandbox that is watched.
#[derive(Debug)]
struct Place {
    /// What is known of it. Nothing while it is looked at.
    post: Option<Box<Post>>,
    files: Files,
}

impl State {
    /// Has a sandbox looked at, and tells whether that is before all others.
    fn schedule(&mut self, due: Instant, id: u64) -> bool {
        let is_sooner = self.due.peek().is_none_or(|Reverse((first, _))| due < *first);
        self.due.push(Reverse((due, id)));
        is_sooner
    }
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            is_slow: Condvar::new(),
            cpu_nanos: AtomicU64::new(0),
            origin: Instant::now(),
        }
    }
}

impl Shared {
    pub(super) fn add(&self, post: Post) -> u64 {
        let due = self.due(Instant::now(), post.first_wait());
        let files = post.files().clone();
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.watched.insert(id, Place { post: Some(Box::new(post)), files });
        let is_sooner = state.schedule(due, id);
        drop(state);
        if is_sooner {
            self.changed.notify_all();
        }
        id
    }

    pub(super) fn remove(&self, id: u64) {
        let mut state = self.state.lock();
        let place = state.watched.remove(&id);
        let nth = state.slow.iter().position(|(slow, _)| *slow == id);
        let slow = nth.and_then(|nth| state.slow.remove(nth));
        if state.watched.is_empty() {
            state.due.clear(); // so that the thread sleeps for good
        }
        drop(state);
        drop((place, slow));
    }

    /// Has the threads end after the looks that they are at, and tells whether they do before long. The kernel may keep one from
    /// reading of a process.
    pub(super) fn close(&self) -> bool {
        let mut state = self.state.lock();
        state.is_closed = true;
        self.changed.notify_all();
        self.is_slow.notify_all();
        self.changed.wait_while_for(&mut state, |state| state.n_threads > 0, END);
        state.n_threads == 0
    }

    /// Counts a thread that is about to run.
    pub(super) fn begin(&self) {
        self.state.lock().n_threads += 1;
    }

    /// Counts it no more.
    pub(super) fn end(&self) {
        self.state.lock().n_threads -= 1;
        self.changed.notify_all();
    }

    /// Looks at what is due until the end.
    pub(super) fn run(&self, pace: Pace) {
        let mut machine = Machine::open();
        let mut counted = 0;
        while let Some(round) = self.next_round(pace) {
            let news = machine.read(|| self.in_files());
            for (id, post) in round {
                if !self.look(id, post, &news, pace) {
                    return self.end();
                }
            }
            if let Ok(time) = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID) {
                let nanos = u64::try_from(time.num_nanoseconds()).unwrap_or_default();
                self.cpu_nanos.fetch_add(nanos.saturating_sub(counted), Ordering::Relaxed);
                counted = nanos;
            }
        }
        self.end();
    }

    /// Looks at a sandbox and puts it back. Returns false at the end.
    fn look(&self, id: u64, mut post: Box<Post>, news: &News, pace: Pace) -> bool {
        let now = Instant::now();
        let wait = post.look(now, news, pace);
        let mut state = self.state.lock();
        if state.is_closed {
            return false;
        }
        let Some(watched) = state.watched.get_mut(&id) else { return true };
        let Some(wait) = wait else {
            state.slow.push_back((id, post));
            drop(state);
            self.is_slow.notify_one();
            return true;
        };
        watched.post = Some(post);
        // What a quick look takes is part of the wait.
        let from = if pace == Pace::Quick { now } else { Instant::now() };
        let is_sooner = state.schedule(self.due(from, wait), id);
        drop(state);
        if is_sooner && pace == Pace::Slow {
            self.changed.notify_all();
        }
        true
    }

    /// Returns how many bytes are in the file systems that sandboxes have in memory.
    fn in_files(&self) -> u64 {
        let files: Vec<Files> = self.state.lock().watched.values().map(|place| place.files.clone()).collect();
        files.iter().map(Files::in_memory).fold(0, u64::saturating_add)
    }

    /// Waits until something is due for a thread of this pace, and takes it. Nothing at the end.
    fn next_round(&self, pace: Pace) -> Option<Vec<(u64, Box<Post>)>> {
        let mut state = self.state.lock();
        let mut round = Vec::new();
        loop {
            if state.is_closed {
                return None;
            }
            if pace == Pace::Slow {
                match state.slow.pop_front() {
                    Some(first) => return Some(vec![first]),
                    None => self.is_slow.wait(&mut state),
                }
                continue;
            }
            let now = Instant::now();
            match state.due.peek() {
                Some(Reverse((due, _))) if *due <= now => {
                    let Some(Reverse((_, id))) = state.due.pop() else { continue };
                    if let Some(post) = state.watched.get_mut(&id).and_then(|place| place.post.take()) {
                        round.push((id, post));
                    }
                }
                _ if !round.is_empty() => return Some(round),
                Some(Reverse((due, _))) => {
                    let wait = due.duration_since(now);
                    self.changed.wait_for(&mut state, wait);
                }
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Returns when what can wait so long is due: at the next beat of the slowest common one that it can wait for.
    fn due(&self, now: Instant, wait: Duration) -> Instant {
        let Some(beat) = BEATS.into_iter().map(Duration::from_millis).find(|beat| *beat <= wait) else {
            return now + wait;
        };
        let into_beat = now.duration_since(self.origin).as_nanos() % beat.as_nanos();
        now + beat.saturating_sub(Duration::from_nanos(u64::try_from(into_beat).unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn nothing_waits_longer_than_it_may(since in 0..u64::MAX / 4, wait in 0..1_000_000_000_u64) {
            let shared = Shared::default();
            let now = shared.origin + Duration::from_nanos(since % 1_000_000_000_000);
            let wait = Duration::from_nanos(wait);
            let due = shared.due(now, wait);
            prop_assert!(due >= now && due <= now + wait.min(LONGEST), "{wait:?}");
        }
    }

    #[test]
    fn what_has_time_is_looked_at_together() {
        let shared = Shared::default();
        let millis = Duration::from_millis;
        let due = |now, wait| shared.due(shared.origin + millis(now), millis(wait)) - shared.origin;
        assert_eq!([due(1, 100), due(42, 100), due(99, 100)], [millis(100); 3]);
        assert_eq!(due(100, 100), millis(200));
        assert_eq!([due(1, 30), due(14, 27)], [millis(25); 2]);
    }
}
