//! Sizes at a granularity, with checked arithmetic alone.

use cuvmm_driver::sys::{CUmemAllocationGranularity_flags, CUmemAllocationProp};
use cuvmm_driver::{Call, Driver};

use crate::error::Error;

/// What sizes and addresses of some memory must be multiples of: a power of two, in bytes.
///
/// ```
/// use cuvmm_handles::Granularity;
///
/// let granularity = Granularity::new(2 << 20).ok_or("no power of two")?;
/// assert_eq!(granularity.round_up(3 << 20)?.bytes(), 4 << 20);
/// assert!(granularity.exact(3 << 20).is_err());
/// assert!(granularity.round_up(usize::MAX).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Granularity(usize);

impl Granularity {
    /// The granularity of that many bytes; none unless it is a power of two.
    pub const fn new(bytes: usize) -> Option<Self> {
        if bytes.is_power_of_two() { Some(Self(bytes)) } else { None }
    }

    /// The least granularity that works for memory of exactly these properties.
    ///
    /// # Errors
    /// What `cuMemGetAllocationGranularity` answers.
    pub fn minimum(driver: &Driver, properties: &CUmemAllocationProp) -> Result<Self, Error> {
        Self::query(driver, properties, CUmemAllocationGranularity_flags::MINIMUM)
    }

    /// The granularity at which memory of exactly these properties performs best.
    ///
    /// # Errors
    /// What `cuMemGetAllocationGranularity` answers.
    pub fn recommended(driver: &Driver, properties: &CUmemAllocationProp) -> Result<Self, Error> {
        Self::query(driver, properties, CUmemAllocationGranularity_flags::RECOMMENDED)
    }

    fn query(
        driver: &Driver,
        properties: &CUmemAllocationProp,
        option: CUmemAllocationGranularity_flags,
    ) -> Result<Self, Error> {
        let bytes = driver.mem_get_allocation_granularity(properties, option)?;
        Self::new(bytes).ok_or(Error::UnexpectedAnswer { call: Call::cuMemGetAllocationGranularity, value: bytes })
    }

    /// How many bytes.
    pub const fn bytes(self) -> usize {
        self.0
    }

    /// The least multiple that is at least `bytes`.
    ///
    /// # Errors
    /// [`Error::SizeOverflow`].
    pub const fn round_up(self, bytes: usize) -> Result<GranularSize, Error> {
        match bytes.checked_add(self.0 - 1) {
            Some(above) => Ok(GranularSize { bytes: above & !(self.0 - 1), granularity: self }),
            None => Err(Error::SizeOverflow { bytes, granularity: self.0 }),
        }
    }

    /// `bytes` as they are.
    ///
    /// # Errors
    /// [`Error::NotGranular`] unless they are a multiple.
    pub const fn exact(self, bytes: usize) -> Result<GranularSize, Error> {
        // It is a power of two, so nothing has to be divided.
        if bytes & (self.0 - 1) == 0 {
            Ok(GranularSize { bytes, granularity: self })
        } else {
            Err(Error::NotGranular { bytes, granularity: self.0 })
        }
    }
}

/// A size that is a multiple of a granularity; it may be zero.
///
/// ```
/// # use cuvmm_handles::Granularity;
/// let granularity = Granularity::new(2 << 20).ok_or("no power of two")?;
/// let size = granularity.exact(4 << 20)?;
/// assert_eq!(size.checked_add(size)?.bytes(), 8 << 20);
/// assert!(granularity.exact(usize::MAX - (2 << 20) + 1)?.checked_add(size).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GranularSize {
    bytes: usize,
    granularity: Granularity,
}

impl GranularSize {
    /// How many bytes.
    pub const fn bytes(self) -> usize {
        self.bytes
    }

    /// The granularity that it is a multiple of.
    pub const fn granularity(self) -> Granularity {
        self.granularity
    }

    /// Whether it is no bytes at all.
    pub const fn is_zero(self) -> bool {
        self.bytes == 0
    }

    /// The sum, at this size's granularity.
    ///
    /// # Errors
    /// [`Error::SizeOverflow`]; [`Error::NotGranular`] where the other's granularity is finer.
    pub const fn checked_add(self, other: Self) -> Result<Self, Error> {
        match self.bytes.checked_add(other.bytes) {
            Some(sum) => self.granularity.exact(sum),
            None => Err(Error::SizeOverflow { bytes: self.bytes, granularity: self.granularity.0 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_up_gives_the_least_multiple_and_keeps_multiples() {
        for shift in [12, 16, 21, 25, 29] {
            let granularity = Granularity::new(1 << shift).unwrap();
            let g = granularity.bytes();
            for bytes in [0, 1, g - 1, g, g + 1, 2 * g - 1, 2 * g, 7 * g + 3] {
                let rounded = granularity.round_up(bytes).unwrap().bytes();
                assert!(rounded >= bytes && rounded < bytes + g && rounded.is_multiple_of(g), "{bytes} at {g}");
                assert_eq!(granularity.round_up(rounded).unwrap().bytes(), rounded);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_an_overflow_and_not_a_small_size() {
        let granularity = Granularity::new(1 << 21).unwrap();
        for bytes in [usize::MAX, usize::MAX - (1 << 21) + 2] {
            assert!(matches!(granularity.round_up(bytes), Err(Error::SizeOverflow { .. })), "{bytes}");
        }
        let most = granularity.round_up(usize::MAX - (1 << 21)).unwrap();
        assert!(matches!(most.checked_add(most), Err(Error::SizeOverflow { .. })));
    }

    #[test]
    fn only_powers_of_two_are_granularities() {
        for bytes in [0, 3, 3 << 20, usize::MAX] {
            assert_eq!(Granularity::new(bytes), None, "{bytes}");
        }
    }

    #[test]
    fn a_sum_stays_at_the_granularity_of_its_left_side() {
        let fine = Granularity::new(1 << 16).unwrap().round_up(1).unwrap();
        let coarse = Granularity::new(1 << 21).unwrap().round_up(1).unwrap();
        assert!(matches!(coarse.checked_add(fine), Err(Error::NotGranular { .. })));
        assert_eq!(fine.checked_add(coarse).unwrap().bytes(), (1 << 16) + (1 << 21));
    }
}
