//! Who is hot, and what to do about it.
