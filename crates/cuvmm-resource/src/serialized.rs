//! [`Options`] as data, with the feature `serde`.
//!
//! What is no data, but a thing of this process, is refused on the way out, and has no name on the way in: a resource that
//! was made of what is left would be another one.

use cuvmm_driver::Device;
use cuvmm_driver::sys::CUdeviceptr;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use crate::growth::GrowthPolicy;
use crate::kind::{Access, GranularityKind, HandleKind, Location, Request};
use crate::options::Options;
use crate::recycling::Recycling;
use crate::release::{OnDrop, Release};
use crate::shortage::Relief;

/// The fields of [`Options`]. One that is absent has its default; one that is not known may have meant something, and is
/// refused.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Options", default = "Options::new", deny_unknown_fields)]
struct Fields {
    location: Location,
    handle_kind: HandleKind,
    handle_fallback: Option<HandleKind>,
    granularity: GranularityKind,
    alignment: usize,
    #[serde(with = "Address")]
    address_hint: CUdeviceptr,
    own_access: Access,
    #[serde(skip_deserializing, skip_serializing_if = "Vec::is_empty", serialize_with = "refuse_peers")]
    peers: Vec<(Device, Access)>,
    rdma: Request,
    compression: Request,
    max_chunk: Option<usize>,
    growth: GrowthPolicy,
    recycling: Option<Recycling>,
    release: Release,
    on_drop: OnDrop,
    #[serde(rename = "retry_out_of_memory")]
    relief: Relief,
}

/// As all numbers, a plain one.
#[derive(Serialize, Deserialize)]
#[serde(remote = "CUdeviceptr")]
struct Address(u64);

impl Serialize for Options {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Fields::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Options {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let options = Fields::deserialize(deserializer)?;
        options.check_values().map_err(de::Error::custom)?;
        Ok(options)
    }
}

fn refuse_peers<S: Serializer>(_peers: &[(Device, Access)], _serializer: S) -> Result<S::Ok, S::Error> {
    Err(ser::Error::custom("peers are devices of this process: name them where the options are read"))
}

pub(crate) fn refuse_stream<T, S: Serializer>(_stream: &T, _serializer: S) -> Result<S::Ok, S::Error> {
    Err(ser::Error::custom("a release stream is one of this process: name it where the options are read"))
}

pub(crate) fn refuse_hook<T, S: Serializer>(_hook: &T, _serializer: S) -> Result<S::Ok, S::Error> {
    Err(ser::Error::custom("a hook is code of this process: give it where the options are read"))
}
