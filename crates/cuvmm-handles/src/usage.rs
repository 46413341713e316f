//! [`Usage`]: how much is reserved, mapped and held, counted by the values themselves.

use std::sync::atomic::{AtomicUsize, Ordering};

use cuvmm_driver::{Driver, StrandedKind};

use crate::allocation::Origin;

/// How many bytes of addresses and memory are held, by all values that are [counted](crate::Reservation::counted) in it,
/// and how many at most so far.
///
/// A number changes only after the driver said yes: it goes up when a value exists, and down when what undoes it
/// succeeded. What could not be undone stays in the numbers, and counts as stranded. Each number is exact for itself;
/// two that are read one after the other may be of different moments.
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_driver::sys::*;
/// # use cuvmm_handles::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let driver = simulator.driver()?;
/// # let location = driver.device(0)?.location();
/// # let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
/// # let size = Granularity::minimum(&driver, &properties)?.round_up(2 << 20)?;
/// let usage = Arc::<Usage>::default();
/// let range = Arc::new(Reservation::reserve(&driver, size, 0)?.counted(&usage));
/// let memory = Arc::new(Allocation::create(&driver, size, &properties)?.counted(&usage));
/// let mapping = Mapping::map(&range, 0, memory, Arc::new([]))?; // counted where its reservation is
/// assert_eq!(usage.mapped().now, 2 << 20);
/// drop(range);
/// mapping.close()?;
/// assert_eq!(usage.created(), Level { now: 0, peak: 2 << 20 });
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct Usage {
    pub(crate) reserved: Gauge,
    pub(crate) mapped: Gauge,
    created: Gauge,
    imported: Gauge,
    retained: Gauge,
    exported: AtomicUsize,
    stranded: AtomicUsize,
}

/// A number of bytes that goes up and down.
///
/// ```
/// # use cuvmm_handles::*;
/// assert_eq!(Usage::default().reserved(), Level { now: 0, peak: 0 });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Level {
    /// How many there are.
    pub now: usize,
    /// The most that there have been.
    pub peak: usize,
}

impl Usage {
    /// Addresses that are reserved.
    pub fn reserved(&self) -> Level {
        self.reserved.level()
    }

    /// Addresses that have memory. Memory that is mapped twice counts twice.
    pub fn mapped(&self) -> Level {
        self.mapped.level()
    }

    /// Memory that was made here and not yet released. An exported handle or a mapping may hold it longer.
    pub fn created(&self) -> Level {
        self.created.level()
    }

    /// Memory that was imported, as its exporters say. It may be imported several times, and counts as often.
    pub fn imported(&self) -> Level {
        self.imported.level()
    }

    /// Memory that was retained from mappings made elsewhere. It may be retained several times, and counts as often.
    pub fn retained(&self) -> Level {
        self.retained.level()
    }

    /// How many handles were exported, dma-bufs among them. It never goes down: nobody tells when one is closed.
    pub fn exported(&self) -> usize {
        self.exported.load(Ordering::Relaxed)
    }

    /// How many values could not be undone.
    pub fn stranded(&self) -> usize {
        self.stranded.load(Ordering::Relaxed)
    }

    /// References to memory that came from there.
    pub(crate) fn held(&self, origin: Origin) -> &Gauge {
        match origin {
            Origin::Created(_) => &self.created,
            Origin::Imported => &self.imported,
            Origin::Retained => &self.retained,
        }
    }

    pub(crate) fn add_exported(&self) {
        self.exported.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts and reports what could not be given back, unless the driver has shut down.
pub(crate) fn strand(
    driver: &Driver,
    usage: Option<&Usage>,
    kind: StrandedKind,
    error: &cuvmm_driver::Error,
    what: &str,
) {
    if let Some(usage) = usage
        && !error.is_shut_down()
    {
        usage.stranded.fetch_add(1, Ordering::Relaxed);
    }
    driver.strand(kind, error, what);
}

/// A [`Level`] that many threads move. Each step is one atomic addition, so that none is lost and the peak is one that
/// there was.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    pub(crate) fn add(&self, bytes: usize) {
        // Sizes of imported memory are whatever its exporter says: their sum may not fit, and must not panic.
        let now = self.now.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if now > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(now, Ordering::Relaxed);
        }
    }

    pub(crate) fn subtract(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn level(&self) -> Level {
        // In this order, so that what was read first is within what is read last.
        let now = self.now.load(Ordering::Relaxed);
        Level { now, peak: self.peak.load(Ordering::Relaxed).max(now) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_the_most_that_there_was_at_once() {
        let gauge = Gauge::default();
        for (up, down, expect) in [(3, 1, (2, 3)), (1, 3, (0, 3)), (2, 0, (2, 3)), (7, 9, (0, 9))] {
            gauge.add(up);
            gauge.subtract(down);
            assert_eq!(gauge.level(), Level { now: expect.0, peak: expect.1 });
        }
    }

    #[test]
    fn sizes_whose_sum_does_not_fit_are_taken_back_as_they_came() {
        let gauge = Gauge::default();
        for bytes in [usize::MAX - 1, 5] {
            gauge.add(bytes);
        }
        assert_eq!(gauge.level().peak, usize::MAX);
        for bytes in [usize::MAX - 1, 5] {
            gauge.subtract(bytes);
        }
        assert_eq!(gauge.level().now, 0);
    }

    #[test]
    fn no_step_of_any_thread_is_lost() {
        const THREADS: usize = 4;
        let gauge = Gauge::default();
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        gauge.add(8);
                        gauge.subtract(7);
                    }
                });
            }
        });
        let Level { now, peak } = gauge.level();
        assert_eq!(now, THREADS * 10_000);
        assert!(peak > now && peak <= now + 7 * THREADS, "{peak}");
    }
}
