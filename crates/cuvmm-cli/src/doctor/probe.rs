//! [`Probe`]: tries one thing, and says what came of it.

use std::sync::Arc;

use cuvmm::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp, CUmemLocation,
    CUmemLocationType,
};
use cuvmm::handles::{Allocation, Granularity, Mapping, Reservation};
use cuvmm::{CUresult, Call, Driver, Error};
use serde_json::{Value, json};

use super::cure::cure;
use super::report::{Answer, Culprit, Row, bytes};
use super::trace::{Made, Trace};

/// What probes are made with.
pub(super) struct Probe<'a> {
    pub(super) driver: &'a Driver,
    /// Sees every call of the driver.
    pub(super) trace: &'a Trace,
}

/// What a probe found that went well.
#[derive(Default)]
pub(super) struct Found {
    detail: String,
    value: Value,
}

impl Found {
    pub(super) fn new(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), value: Value::Null }
    }

    pub(super) fn value(self, value: impl Into<Value>) -> Self {
        Self { value: value.into(), ..self }
    }
}

/// Why a probe found what it looked for not to work.
#[derive(Debug)]
pub(super) enum Refused {
    /// Something failed.
    Failed(Error),
    /// A call succeeded, and what came of it is wrong.
    Wrong(Call, String),
}

impl Refused {
    pub(super) fn culprit(&self) -> Culprit {
        match self {
            Self::Failed(error) => Culprit { call: error.call(), code: error.code() },
            Self::Wrong(call, _) => Culprit { call: Some(*call), code: None },
        }
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Failed(error) => error.fmt(f),
            Self::Wrong(call, what) => write!(f, "{call} succeeded, but {what}"),
        }
    }
}

/// From the errors of the layers, by way of the facade's.
macro_rules! from {
    ($($error:ty),*) => {$(
        impl From<$error> for Refused {
            fn from(error: $error) -> Self {
                Self::Failed(error.into())
            }
        }
    )*};
}

from!(cuvmm::driver::Error, cuvmm::handles::Error, cuvmm::resource::Error, cuvmm::CloseError);

pub(super) type Outcome<T = Found> = Result<T, Refused>;

impl Probe<'_> {
    /// Whether something works. It does where no call that it took failed.
    pub(super) fn try_out(&self, id: &str, title: &str, attempt: impl FnOnce() -> Outcome) -> Row {
        self.row(id, title, Answer::Yes, attempt)
    }

    /// What the driver says of something.
    pub(super) fn ask(&self, id: &str, title: &str, question: impl FnOnce() -> Outcome) -> Row {
        self.row(id, title, Answer::Fact, question)
    }

    fn row(&self, id: &str, title: &str, answer: Answer, attempt: impl FnOnce() -> Outcome) -> Row {
        drop(self.trace.take());
        let outcome = attempt();
        let made = self.trace.take();
        let row = match outcome {
            Ok(found) => match made.iter().find(|made| is_failure(made)) {
                None => Row { answer, ..Row::fact(id, title, found.detail).value(found.value) },
                // It was lost in a drop, or got over.
                Some(Made { call, code }) => {
                    let culprit = Culprit { call: Some(*call), code: Some(*code) };
                    Row::no(id, title, culprit, format!("{call} failed with {code}, after which the rest went well"))
                }
            },
            Err(refused) => Row::no(id, title, refused.culprit(), refused.to_string()),
        };
        let cure = match &row.answer {
            Answer::No(culprit) => cure(id, *culprit),
            _ => None,
        };
        Row { calls: made.iter().map(|made| made.call).collect(), ..row.cure(cure) }
    }

    /// What sizes and addresses of such memory are multiples of.
    pub(super) fn granularity(&self, kind: &str, words: &str, properties: &CUmemAllocationProp) -> Row {
        self.ask(&format!("granularity_{kind}"), &format!("granularity, {words}"), || {
            let minimum = Granularity::minimum(self.driver, properties)?.bytes();
            let recommended = Granularity::recommended(self.driver, properties)?.bytes();
            let detail = format!("{}, recommended {}", bytes(minimum as u64), bytes(recommended as u64));
            Ok(Found::new(detail).value(json!({ "minimum": minimum, "recommended": recommended })))
        })
    }

    /// The least there can be of such memory.
    pub(super) fn make(&self, properties: &CUmemAllocationProp) -> Outcome<Allocation> {
        let size = Granularity::minimum(self.driver, properties)?.round_up(1)?;
        Ok(Allocation::create(self.driver, size, properties)?)
    }

    /// Maps memory in a reservation of its own, grants these locations access, and sees whether the devices among them
    /// have it. What drivers answer for the host is not told by their manual.
    pub(super) fn map(&self, memory: Allocation, grantees: &[CUmemLocation]) -> Outcome<Mapping> {
        let size = Reservation::GRANULARITY.round_up(memory.size())?;
        let range = Arc::new(Reservation::reserve(self.driver, size, memory.granularity().bytes())?);
        let flags = CUmemAccess_flags::READWRITE;
        let access = grantees.iter().map(|&location| CUmemAccessDesc { location, flags }).collect();
        let mapping = Mapping::map(&range, 0, Arc::new(memory), access)?;
        for &location in grantees.iter().filter(|grantee| grantee.location_type == CUmemLocationType::DEVICE) {
            let granted = self.driver.mem_get_access(location, mapping.address())?;
            if granted != flags {
                return Err(Refused::Wrong(Call::cuMemSetAccess, format!("the access granted reads {}", granted.0)));
            }
        }
        Ok(mapping)
    }

    /// Makes such memory, maps it, grants access and gives all back; how much it was.
    pub(super) fn round_trip(&self, properties: &CUmemAllocationProp, grantees: &[CUmemLocation]) -> Outcome<usize> {
        let mapping = self.map(self.make(properties)?, grantees)?;
        let size = mapping.size();
        mapping.close()?;
        Ok(size)
    }
}

/// Memory that can't be exported.
pub(super) fn plain(location: CUmemLocation) -> CUmemAllocationProp {
    CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE)
}

/// Whether a call that everything else got over should have succeeded.
fn is_failure(made: &Made) -> bool {
    match (made.call, made.code) {
        // It is not done yet.
        (_, CUresult::NOT_READY) => false,
        // The driver is older than the attribute.
        (Call::cuDeviceGetAttribute, CUresult::INVALID_VALUE) => false,
        // So much can't be had: the search for the most goes on with less, and everything else ends in its error.
        (Call::cuMemAddressReserve, CUresult::OUT_OF_MEMORY) => false,
        (_, code) => !code.is_success(),
    }
}
