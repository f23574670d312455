//! Values of a type: encoded once per write, decoded once per load, not once per hit.

use crate::error::{Error, ErrorKind, Result};
use crate::heatsink::Heatsink;
use crate::read::{From, Read, absent};
use crate::shared::Loaded;
use crate::store::Stored;
use crate::value::Value;
use crate::write::Put;
use bytes::Bytes;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

/// Bytes from values of type `T`, and back.
pub trait Codec<T>: Clone + Send + Sync + 'static {
    /// The bytes of `value`.
    ///
    /// # Errors
    /// [`Codec`](ErrorKind::Codec).
    fn encode(&self, value: &T) -> Result<Bytes>;

    /// The value in `bytes`.
    ///
    /// # Errors
    /// [`Codec`](ErrorKind::Codec).
    fn decode(&self, bytes: &[u8]) -> Result<T>;
}

/// JSON, through `serde_json`. Feature `json`.
#[cfg(feature = "json")]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Json;

#[cfg(feature = "json")]
impl<T: serde::Serialize + serde::de::DeserializeOwned> Codec<T> for Json {
    fn encode(&self, value: &T) -> Result<Bytes> {
        let error = |e| Error::not_applied(ErrorKind::Codec, "not encoded as JSON").with_source(e);
        serde_json::to_vec(value).map(Bytes::from).map_err(error)
    }

    fn decode(&self, bytes: &[u8]) -> Result<T> {
        let error =
            |e| Error::not_applied(ErrorKind::Codec, "not JSON of this type").with_source(e);
        serde_json::from_slice(bytes).map_err(error)
    }
}

/// UTF-8 text.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Text;

impl Codec<String> for Text {
    fn encode(&self, value: &String) -> Result<Bytes> {
        Ok(Bytes::copy_from_slice(value.as_bytes()))
    }

    fn decode(&self, bytes: &[u8]) -> Result<String> {
        let error = |e| Error::not_applied(ErrorKind::Codec, "not UTF-8").with_source(e);
        std::str::from_utf8(bytes).map(str::to_owned).map_err(error)
    }
}

/// A view of a handle that reads and writes values of type `T`. See [`Heatsink::typed`].
pub struct Typed<T, C> {
    hs: Heatsink,
    codec: C,
    of: PhantomData<fn() -> T>,
}

/// A value of type `T` as it was read. It derefs to `T`, and knows its age and its source.
pub struct Cached<T>(Repr<T>);

enum Repr<T> {
    /// Decoded in the entry that all callers of one load share.
    Shared(Value, PhantomData<fn() -> T>),
    /// Decoded for this caller: the entry holds another type.
    Own(Value, Arc<T>),
}

impl<T, C: Clone> Clone for Typed<T, C> {
    fn clone(&self) -> Self {
        Typed { hs: self.hs.clone(), codec: self.codec.clone(), of: PhantomData }
    }
}

impl<T: Send + Sync + 'static, C: Codec<T>> Typed<T, C> {
    /// The value under `key`, or `None`.
    ///
    /// # Staleness, Cost, Cancel safety
    /// As [`Heatsink::get`].
    ///
    /// # Errors
    /// As [`Heatsink::get`], and [`Codec`](ErrorKind::Codec).
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Cached<T>>> {
        self.get_with(key, Read::new()).await
    }

    /// Like [`get`](Typed::get), with a deadline or a limit on the age.
    ///
    /// # Errors
    /// As [`get`](Typed::get) and [`Heatsink::get_with`].
    pub async fn get_with(&self, key: impl AsRef<[u8]>, read: Read) -> Result<Option<Cached<T>>> {
        let key = key.as_ref();
        let value = self.hs.get_with(key, read).await?;
        value.map(|v| self.cached(v).map_err(|e| e.with_key(key))).transpose()
    }

    /// The value of `key` as `loader` brings it. See [`Heatsink::load`].
    ///
    /// # Staleness, Cost, Cancel safety
    /// As [`Heatsink::load`].
    ///
    /// # Errors
    /// As [`Heatsink::load`], and [`Codec`](ErrorKind::Codec).
    ///
    /// # Example
    /// ```
    /// use heatsink::{Heatsink, Text, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let names = Heatsink::new(MemoryStore::new(8))?.typed::<String, _>(Text);
    /// # async fn query(id: u64) -> Result<String, std::io::Error> { Ok(format!("user {id}")) }
    /// let name = names.load("user:9:name", || query(9)).await?;
    /// assert_eq!(name.to_uppercase(), "USER 9");
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub async fn load<E, Fut>(
        &self,
        key: impl AsRef<[u8]>,
        loader: impl FnOnce() -> Fut + Send + 'static,
    ) -> Result<Cached<T>>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let key = key.as_ref();
        let codec = self.codec.clone();
        let from = From::loader(|| async move {
            let value = loader().await.map_err(Error::loader)?;
            let stored = Some(Stored::new(codec.encode(&value)?));
            Ok(Loaded { stored, by_loader: true, uncached: false, decoded: Some(Arc::new(value)) })
        });
        let value = self.hs.load_raw(key, Read::new(), from).await?;
        if value.entry().absent {
            return Err(absent().with_key(key));
        }
        self.cached(value).map_err(|e| e.with_key(key))
    }

    /// Writes `value` under `key`.
    ///
    /// # Cost, Cancel safety
    /// As [`Heatsink::put`].
    ///
    /// # Errors
    /// As [`Heatsink::put`], and [`Codec`](ErrorKind::Codec) before anything is sent.
    pub async fn put(&self, key: impl AsRef<[u8]>, value: &T) -> Result<()> {
        self.put_with(key, value, Put::new()).await
    }

    /// Like [`put`](Typed::put), with a time to live.
    ///
    /// # Errors
    /// As [`put`](Typed::put).
    pub async fn put_with(&self, key: impl AsRef<[u8]>, value: &T, put: Put) -> Result<()> {
        let bytes = self.codec.encode(value)?;
        self.hs.put_with(key, bytes, put).await
    }

    fn cached(&self, value: Value) -> Result<Cached<T>> {
        let decoded = &value.entry().decoded;
        if let Some(other) = decoded.get()
            && !other.is::<T>()
        {
            let own = Arc::new(self.codec.decode(&value)?);
            return Ok(Cached(Repr::Own(value, own)));
        }
        if decoded.get().is_none() {
            let own = Arc::new(self.codec.decode(&value)?);
            if decoded.set(own.clone()).is_err() {
                return Ok(Cached(Repr::Own(value, own)));
            }
        }
        Ok(Cached(Repr::Shared(value, PhantomData)))
    }
}

impl<T, C: Codec<T>> Typed<T, C> {
    pub(crate) fn new(hs: Heatsink, codec: C) -> Typed<T, C> {
        Typed { hs, codec, of: PhantomData }
    }
}

impl<T> Cached<T> {
    /// The value as bytes, with its age and its source.
    #[must_use]
    pub fn value(&self) -> &Value {
        match &self.0 {
            Repr::Shared(value, _) | Repr::Own(value, _) => value,
        }
    }

    /// How old the value was when it was served, counted from the start of its load.
    #[must_use]
    pub fn age(&self) -> std::time::Duration {
        self.value().age()
    }
}

impl<T: 'static> Deref for Cached<T> {
    type Target = T;
    fn deref(&self) -> &T {
        match &self.0 {
            Repr::Own(_, own) => own,
            Repr::Shared(value, _) => {
                value.entry().decoded.get().and_then(|d| d.downcast_ref()).expect(
                    "the type was checked when this was made, and a OnceLock keeps its value",
                )
            }
        }
    }
}

impl<T> Clone for Cached<T> {
    fn clone(&self) -> Self {
        Cached(match &self.0 {
            Repr::Shared(value, of) => Repr::Shared(value.clone(), *of),
            Repr::Own(value, own) => Repr::Own(value.clone(), own.clone()),
        })
    }
}

impl<T: fmt::Debug + 'static> fmt::Debug for Cached<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T: fmt::Display + 'static> fmt::Display for Cached<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Serialises as the value itself. Feature `json`.
#[cfg(feature = "json")]
impl<T: serde::Serialize + 'static> serde::Serialize for Cached<T> {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        (**self).serialize(s)
    }
}

impl<T, C> fmt::Debug for Typed<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Typed").field("of", &std::any::type_name::<T>()).finish()
    }
}
