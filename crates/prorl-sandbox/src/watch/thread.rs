//! The thread, and when it looks at what.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use nix::{
    sys::time::TimeValLike as _,
    time::{ClockId, clock_gettime},
};
use parking_lot::{Condvar, Mutex};
use tokio::time::Instant;

use super::{machine::Machine, post::Post};

/// What the thread is called; the kernel keeps 15 letters.
pub(super) const NAME: &str = "prorl-watch";

/// The longest that a sandbox is not looked at.
pub(super) const LONGEST: Duration = Duration::from_millis(100);

/// How long the end of the thread is waited for.
const END: Duration = Duration::from_secs(1);

/// The beats at which sandboxes are looked at, in milliseconds. One waking serves all that have the same.
const BEATS: [u64; 7] = [100, 50, 25, 10, 5, 2, 1];

/// What the thread shares with those who start and end sandboxes.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    pub(super) cpu_nanos: AtomicU64,
    /// When all beats began.
    origin: Instant,
}

#[derive(Debug, Default)]
struct State {
    /// What is watched; nothing in place of what is just being looked at.
    posts: HashMap<u64, Option<Box<Post>>>,
    /// When to look next. What is not watched any more may be among them.
    due: BinaryHeap<Reverse<(Instant, u64)>>,
    next_id: u64,
    is_closed: bool,
    /// Whether the thread looks at nothing any more.
    has_ended: bool,
}

impl Default for Shared {
    fn default() -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), cpu_nanos: AtomicU64::new(0), origin: Instant::now() }
    }
}

impl Shared {
    pub(super) fn add(&self, post: Post) -> u64 {
        let due = self.due(Instant::now(), post.first_wait());
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.posts.insert(id, Some(Box::new(post)));
        let is_sooner = state.due.peek().is_none_or(|Reverse((first, _))| due < *first);
        state.due.push(Reverse((due, id)));
        drop(state);
        if is_sooner {
            self.changed.notify_all();
        }
        id
    }

    pub(super) fn remove(&self, id: u64) {
        let mut state = self.state.lock();
        let post = state.posts.remove(&id);
        if state.posts.is_empty() {
            state.due.clear(); // so that the thread sleeps for good
        }
        drop(state);
        drop(post);
    }

    /// Has the thread end after the look that it is at, and tells whether it does before long. The kernel may keep it from reading of
    /// a process.
    pub(super) fn close(&self) -> bool {
        let mut state = self.state.lock();
        state.is_closed = true;
        self.changed.notify_all();
        self.changed.wait_while_for(&mut state, |state| !state.has_ended, END);
        state.has_ended
    }

    /// Looks at what is due until the end.
    pub(super) fn run(&self) {
        self.look_until_closed();
        self.state.lock().has_ended = true;
        self.changed.notify_all();
    }

    fn look_until_closed(&self) {
        let mut machine = Machine::open();
        while let Some(round) = self.next_round() {
            let news = machine.read();
            for (id, mut post) in round {
                let now = Instant::now();
                let wait = post.look(now, &news);
                // What a look takes is part of the wait.
                let due = self.due(now, wait);
                let mut state = self.state.lock();
                if let Some(place) = state.posts.get_mut(&id) {
                    *place = Some(post);
                    state.due.push(Reverse((due, id)));
                }
                if state.is_closed {
                    return;
                }
            }
            if let Ok(time) = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID) {
                let nanos = u64::try_from(time.num_nanoseconds()).unwrap_or_default();
                self.cpu_nanos.store(nanos, Ordering::Relaxed);
            }
        }
    }

    /// Waits until something is due, and takes it. Nothing at the end.
    fn next_round(&self) -> Option<Vec<(u64, Box<Post>)>> {
        let mut state = self.state.lock();
        let mut round = Vec::new();
        loop {
            if state.is_closed {
                return None;
            }
            let now = Instant::now();
            match state.due.peek() {
                Some(Reverse((due, _))) if *due <= now => {
                    let Some(Reverse((_, id))) = state.due.pop() else { continue };
                    if let Some(post) = state.posts.get_mut(&id).and_then(Option::take) {
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
