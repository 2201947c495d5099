//! Which processors a sandbox runs on, and what programs are told of their number.

use std::{
    fs,
    num::NonZeroUsize,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use nix::{
    sched::{CpuSet, sched_getaffinity},
    unistd::Pid,
};
use parking_lot::Mutex;

/// Variables that tell programs and libraries how many threads to start. Most of these would count the machine's processors,
/// which is many more threads than a sandbox has processors for. One that an image or a spec sets is left alone.
pub(crate) const THREAD_VARIABLES: [&str; 15] = [
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "NUMBA_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "PYTHON_CPU_COUNT",
    "RAYON_NUM_THREADS",
    "TOKIO_WORKER_THREADS",
    "GOMAXPROCS",
    "JULIA_NUM_THREADS",
    "CMAKE_BUILD_PARALLEL_LEVEL",
    "CARGO_BUILD_JOBS",
];

/// Returns how many whole processors this many are, at least one. `cpus` is a checked limit.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked limits are small and above zero")]
pub(crate) fn whole(cpus: f64) -> u32 {
    (cpus.ceil() as u32).max(1)
}

/// Returns the numbers of the processors that this process may run on, which its main thread tells; never none.
pub(crate) fn allowed() -> Vec<u32> {
    let by_call = sched_getaffinity(Pid::this()).ok().map(|set| {
        let is_in = |number: &usize| set.is_set(*number).unwrap_or(false);
        (0..CpuSet::count()).filter(is_in).filter_map(|number| u32::try_from(number).ok()).collect::<Vec<_>>()
    });
    // A machine with more processors than the C library's set can hold is told by the kernel's list alone.
    let by_list = || parse_list(fs::read_to_string("/proc/self/status").ok()?.as_str());
    let found = by_call.or_else(by_list).filter(|numbers| !numbers.is_empty());
    found.unwrap_or_else(|| {
        let n_processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        (0..u32::try_from(n_processors).unwrap_or(1)).collect()
    })
}

/// Reads the processors of a process's status that a [`CpuSet`] can hold.
fn parse_list(status: &str) -> Option<Vec<u32>> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut numbers = Vec::new();
    for range in list.trim().split(',') {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        numbers.extend(from.parse::<u32>().ok()?..=to.parse().ok()?);
    }
    numbers.retain(|number| usize::try_from(*number).is_ok_and(|number| number < CpuSet::count()));
    Some(numbers)
}

/// The processors that the sandboxes of a node are spread over. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Processors(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Held while some are chosen, so that two sandboxes that start at once get different ones. Not when they are given back: a
    /// forked process may do so with a copy of a lock that nobody will ever open.
    ///
    /// Where the choice begins among those of equal load: not always with the first, which has the machine's own work too.
    choosing: Mutex<usize>,
    all: Vec<Processor>,
}

#[derive(Debug)]
struct Processor {
    number: u32,
    n_sandboxes: AtomicU32,
}

impl Processors {
    /// Processors of these numbers.
    pub(crate) fn new(numbers: Vec<u32>) -> Self {
        let all = numbers.into_iter().map(|number| Processor { number, n_sandboxes: AtomicU32::new(0) }).collect();
        Self(Arc::new(Inner { choosing: Mutex::new(0), all }))
    }

    /// Gives a sandbox `n_wanted` of those that the fewest sandboxes have, or all where there are not so many.
    pub(crate) fn share(&self, n_wanted: u32) -> Share {
        let n_wanted = usize::try_from(n_wanted).unwrap_or(usize::MAX);
        let n_all = self.0.all.len();
        let mut first = self.0.choosing.lock();
        let mut chosen: Vec<usize> = (*first..n_all).chain(0..*first).collect();
        chosen.sort_by_key(|idx| self.0.all[*idx].n_sandboxes.load(Ordering::Relaxed)); // stable
        chosen.truncate(n_wanted);
        *first = chosen.last().map_or(0, |last| (last + 1) % n_all);
        for idx in &chosen {
            self.0.all[*idx].n_sandboxes.fetch_add(1, Ordering::Relaxed);
        }
        drop(first);
        chosen.sort_unstable();
        Share { of: self.clone(), chosen }
    }
}

/// The processors that a sandbox has. They are given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    of: Processors,
    chosen: Vec<usize>,
}

impl Share {
    /// Returns their numbers, the lowest first.
    pub(crate) fn numbers(&self) -> Vec<u32> {
        self.chosen.iter().map(|idx| self.of.0.all[*idx].number).collect()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        for idx in &self.chosen {
            self.of.0.all[*idx].n_sandboxes.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn this_process_may_run_somewhere() {
        let numbers = allowed();
        assert!(!numbers.is_empty());
        let status = fs::read_to_string("/proc/self/status").unwrap();
        assert_eq!(parse_list(&status).unwrap(), numbers);
    }

    #[test]
    fn the_kernels_list_is_understood() {
        let list = |text: &str| parse_list(&format!("Name:\tx\nCpus_allowed_list:\t{text}\nMems_allowed:\t1\n"));
        assert_eq!(list("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(list("1023-1030"), Some(vec![1023]), "no set holds the others");
        assert_eq!([list("x"), list("1-")], [None, None]);
        assert_eq!(parse_list("Name:\tx\n"), None);
    }

    #[test]
    fn parts_of_a_processor_are_whole_ones() {
        assert_eq!([0.01, 1.0, 1.01, 64.0].map(whole), [1, 1, 2, 64]);
    }

    #[test]
    fn a_share_is_given_back() {
        let processors = Processors::new(vec![4, 5, 7]);
        let first = processors.share(2);
        assert_eq!(first.numbers(), [4, 5]);
        let second = processors.share(1);
        assert_eq!(second.numbers(), [7]);
        drop(second);
        let third = processors.share(1);
        assert_eq!(third.numbers(), [7], "the others have one each");
        drop(first);
        assert_eq!(processors.share(2).numbers(), [4, 5]);
        drop(third);
        assert_eq!(processors.share(9).numbers(), [4, 5, 7]);
    }

    proptest! {
        #[test]
        fn no_processor_has_much_more_than_another(wanted in prop::collection::vec(1_u32..5, 0..40)) {
            let processors = Processors::new((0..5).collect());
            let shares: Vec<_> = wanted.iter().map(|n_wanted| processors.share(*n_wanted)).collect();
            for (share, n_wanted) in shares.iter().zip(&wanted) {
                prop_assert_eq!(share.numbers().len(), *n_wanted as usize);
            }
            let loads = processors.0.all.iter().map(|one| one.n_sandboxes.load(Ordering::Relaxed));
            let (least, most) = (loads.clone().min(), loads.max());
            prop_assert!(most.unwrap() - least.unwrap() <= 1);
        }
    }
}
