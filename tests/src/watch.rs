//! [`Watches`]: a hook that takes notes of calls and changes nothing.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use cuvmm_driver::{Call, Failure, Hook, Invocation};

/// The notes that are taken of a driver's calls. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watches {
    notes: Arc<Mutex<Vec<(Call, Watched)>>>,
}

/// The arguments of the calls of one name, in order, also of those that failed.
#[derive(Clone, Debug, Default)]
pub struct Watched {
    arguments: Arc<Mutex<Vec<Vec<u64>>>>,
}

impl Watches {
    /// Takes notes of all later calls of that name.
    pub(crate) fn watch(&self, call: Call) -> Watched {
        let watched = Watched::default();
        self.notes.lock().unwrap().push((call, watched.clone()));
        watched
    }
}

impl Hook for Watches {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        for (_, watched) in self.notes.lock().unwrap().iter().filter(|(call, _)| *call == invocation.call) {
            watched.arguments.lock().unwrap().push(invocation.arguments.to_vec());
        }
        None
    }
}

impl Watched {
    /// The first two arguments of each call so far, which are address and size for most; forgets them.
    pub fn take_pairs(&self) -> Vec<(u64, u64)> {
        let calls = std::mem::take(&mut *self.arguments.lock().unwrap());
        calls.into_iter().map(|arguments| (arguments[0], arguments[1])).collect()
    }

    /// The same as a set of ranges, each of which must have been named once.
    #[track_caller]
    pub fn take_ranges(&self) -> BTreeSet<(u64, usize)> {
        let pairs = self.take_pairs();
        let ranges: BTreeSet<_> = pairs.iter().map(|pair| (pair.0, pair.1 as usize)).collect();
        assert_eq!(ranges.len(), pairs.len(), "a range named twice");
        ranges
    }
}
