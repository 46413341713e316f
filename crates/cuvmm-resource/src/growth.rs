//! [`GrowthPolicy`]: how much memory a grow adds.

use cuvmm_handles::Granularity;

use crate::error::Error;

/// How much memory a grow adds, beyond what is asked for.
///
/// A buffer's size is what was asked for; what was added beyond it is there for the next grows, which are then
/// [covered](crate::Outcome::Covered) without a driver call. Fewer and larger chunks cost less to make, to move and to
/// share. Where the device has no more than what is asked for, that is added; and where what is asked for has room in the
/// buffer's capacity, no more than has room there. What a buffer is allocated with is what was asked for, by each policy.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// let options = Options::new().growth(GrowthPolicy::doubling());
/// let mut buffer = VirtualMemoryResource::new(&device, options)?.allocate_with_capacity(2 << 20, 8 << 30)?;
/// for megabytes in (4..=4096).step_by(2) {
///     buffer = buffer.grow_into(megabytes << 20)?;
/// }
/// assert_eq!((buffer.size(), buffer.chunks().len()), (4 << 30, 12));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
pub enum GrowthPolicy {
    /// What is asked for.
    #[default]
    Exact,
    /// A multiple of this many bytes.
    Step(usize),
    /// In proportion to what the buffer has, so that up to the cap the number of chunks grows with the logarithm of its
    /// size.
    Geometric {
        /// How much is added, in percent of what the buffer has: 100 doubles it.
        percent: u32,
        /// The least that is added, in bytes.
        floor: usize,
        /// The most that is added, in bytes, unless more is asked for.
        cap: usize,
    },
}

impl GrowthPolicy {
    /// Doubles what a buffer has, whatever that is.
    pub const fn doubling() -> Self {
        Self::Geometric { percent: 100, floor: 0, cap: usize::MAX }
    }

    /// Refuses numbers that mean nothing.
    pub(crate) fn check(self) -> Result<(), Error> {
        match self {
            Self::Step(0) => Err(Error::GrowthPolicy { reason: "a step of 0 bytes" }),
            Self::Geometric { percent: 0, .. } => Err(Error::GrowthPolicy { reason: "a growth of 0 percent" }),
            Self::Geometric { floor, cap, .. } if floor > cap => {
                Err(Error::GrowthPolicy { reason: "a floor above the cap" })
            }
            _ => Ok(()),
        }
    }

    /// How many bytes to add to a buffer that has `end` and needs `needed` more, both multiples of the granularity: at
    /// least those. What would overflow is not wished for.
    pub(crate) fn wish(self, end: usize, needed: usize, granularity: Granularity) -> usize {
        let wish = match self {
            Self::Exact => Some(needed),
            Self::Step(step) => needed.checked_next_multiple_of(step),
            Self::Geometric { percent, floor, cap } => {
                // Divided first: what is lost by that is less than a hundred bytes.
                let share =
                    (end / 100).saturating_mul(percent as usize).saturating_add(end % 100 * percent as usize / 100);
                Some(share.clamp(floor, cap))
            }
        };
        let rounded = wish.and_then(|wish| granularity.round_up(wish).ok()).map_or(needed, |size| size.bytes());
        if end.checked_add(rounded).is_some() { rounded.max(needed) } else { needed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: usize = 2 << 20;

    fn wish(policy: GrowthPolicy, end: usize, needed: usize) -> usize {
        policy.wish(end, needed, Granularity::new(G).unwrap())
    }

    #[test]
    fn what_is_needed_is_always_added_and_in_whole_granules() {
        let policies = [
            GrowthPolicy::Exact,
            GrowthPolicy::Step(1),
            GrowthPolicy::Step(3 * G + 1),
            GrowthPolicy::Step(usize::MAX),
            GrowthPolicy::doubling(),
            GrowthPolicy::Geometric { percent: 1, floor: 0, cap: 1 },
            GrowthPolicy::Geometric { percent: u32::MAX, floor: usize::MAX, cap: usize::MAX },
        ];
        let most = usize::MAX / G * G;
        for policy in policies {
            for end in [0, G, 7 * G, 1 << 40, most / 2 / G * G, most - G] {
                for needed in [G, 5 * G, 1 << 40, most - end].into_iter().filter(|needed| *needed <= most - end) {
                    let wish = wish(policy, end, needed);
                    assert!(wish >= needed && wish.is_multiple_of(G), "{policy:?} {end} {needed}: {wish}");
                    assert!(end.checked_add(wish).is_some(), "{policy:?} {end} {needed}: {wish}");
                }
            }
        }
    }

    #[test]
    fn each_policy_adds_what_it_says() {
        assert_eq!(wish(GrowthPolicy::Exact, 10 * G, G), G);
        assert_eq!(wish(GrowthPolicy::Step(4 * G), 10 * G, 5 * G), 8 * G);
        assert_eq!(wish(GrowthPolicy::doubling(), 10 * G, G), 10 * G);
        let half = GrowthPolicy::Geometric { percent: 50, floor: 4 * G, cap: 8 * G };
        assert_eq!([0, 2, 10, 100].map(|end| wish(half, end * G, G) / G), [4, 4, 5, 8]);
        assert_eq!(wish(half, 100 * G, 9 * G), 9 * G);
    }
}
