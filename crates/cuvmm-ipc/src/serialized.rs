//! What a descriptor says, as data, with the feature `serde`: without the handles, and checked on the way in.
//!
//! Ids are hexadecimal digits as they are displayed. Reading makes nothing: no handle, no import, no call.

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUuuid};
use cuvmm_resource::HandleKind;
use serde::de::{Error, Unexpected};
use serde::{Deserialize, Deserializer, Serialize, Serializer, ser};

use crate::descriptor::Metadata;
use crate::identity::{BufferId, Hex, HostId, Location, parse_digits};

/// The fields of [`Metadata`]. What may be untold may be absent; one that is not known may have been to be compared, and
/// is refused.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Metadata", deny_unknown_fields)]
struct Fields {
    #[serde(with = "kind")]
    handle_kind: CUmemAllocationHandleType,
    location: Option<Location>,
    id: Option<BufferId>,
    host: Option<HostId>,
    sizes: Vec<usize>,
    size: usize,
}

impl Serialize for Metadata {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Fields::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let metadata = Fields::deserialize(deserializer)?;
        metadata.check().map_err(Error::custom)?;
        Ok(metadata)
    }
}

/// The fields of [`BufferId`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Id {
    family: String,
    generation: u64,
}

impl Serialize for BufferId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Id { family: Hex(self.family()).to_string(), generation: self.generation() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for BufferId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Id { family, generation } = Id::deserialize(deserializer)?;
        let id = parse_digits(&family).and_then(|family| Self::new(family, generation));
        id.ok_or_else(|| wrong(&family))
    }
}

impl Serialize for HostId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for HostId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse_digits(&text).and_then(Self::new).ok_or_else(|| wrong(&text))
    }
}

fn wrong<E: Error>(digits: &str) -> E {
    E::invalid_value(Unexpected::Str(digits), &"32 hexadecimal digits, not all of them 0")
}

/// A kind of handle by the name that the resource's options have for it.
mod kind {
    use super::*;

    pub(super) fn serialize<S: Serializer>(kind: &CUmemAllocationHandleType, to: S) -> Result<S::Ok, S::Error> {
        HandleKind::try_from(*kind).map_err(ser::Error::custom)?.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<CUmemAllocationHandleType, D::Error> {
        Ok(HandleKind::deserialize(from)?.as_driver())
    }
}

/// A device's UUID as `nvidia-smi` writes it.
pub(crate) mod uuid {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(uuid: &CUuuid, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(uuid)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<CUuuid, D::Error> {
        let text = String::deserialize(from)?;
        let bytes = text.strip_prefix("GPU-").and_then(parse_digits);
        let wrong = || D::Error::invalid_value(Unexpected::Str(&text), &"GPU- and 32 hexadecimal digits");
        Ok(CUuuid { bytes: bytes.ok_or_else(wrong)? })
    }
}
