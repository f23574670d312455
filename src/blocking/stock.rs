//! Stock, tokens, waiting rooms and balances for plain threads.

use super::{Heatsink, block_on};
use crate::counter::Sum;
use crate::error::Result;
use crate::stock::{Accounts, Debited, Fate, OpenHold, Popping, Taken};
use std::time::Duration;

impl Heatsink {
    /// See [`crate::Heatsink::stock`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Example
    /// ```
    /// use heatsink::{Taken, blocking, store::MemoryStore};
    /// let hs = blocking::Heatsink::new(MemoryStore::new(8))?;
    /// let shoes = hs.stock("sku:AJ1")?;
    /// shoes.create(10_000, 16)?;
    /// if let Taken::Held(held) = shoes.take(1, "order:77")? {
    ///     shoes.confirm(&held)?; // or shoes.put_back(&held)
    /// }
    /// assert_eq!(shoes.remaining()?.total(), 9_999);
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn stock(&self, key: impl AsRef<[u8]>) -> Result<Stock> {
        self.0.stock(key).map(Stock)
    }

    /// See [`crate::Heatsink::tokens`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Example
    /// ```
    /// use heatsink::{Popping, blocking, store::MemoryStore};
    /// let hs = blocking::Heatsink::new(MemoryStore::new(8))?;
    /// let seats = hs.tokens("hall:7")?;
    /// seats.mint(200, 4)?;
    /// if let Popping::Token(seat) = seats.pop("order:77")? {
    ///     seats.confirm(&seat)?; // or seats.put_back(&seat)
    /// }
    /// assert_eq!(seats.accounts()?.sold, 1);
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn tokens(&self, key: impl AsRef<[u8]>) -> Result<Tokens> {
        self.0.tokens(key).map(Tokens)
    }

    /// See [`crate::Heatsink::balance`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Example
    /// ```
    /// use heatsink::{Debited, blocking, store::MemoryStore};
    /// let hs = blocking::Heatsink::new(MemoryStore::new(8))?;
    /// let wallet = hs.balance("creator:7")?;
    /// wallet.open(0, -50, 4)?;
    /// wallet.credit(100, "gift:1")?;
    /// assert_eq!(wallet.debit(150, "payout:1")?, Debited::Made);
    /// assert!(wallet.reverse("payout:1")?);
    /// assert_eq!(wallet.total()?.total(), 100);
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn balance(&self, key: impl AsRef<[u8]>) -> Result<Balance> {
        self.0.balance(key).map(Balance)
    }

    /// See [`crate::Heatsink::waiting_room`].
    ///
    /// # Errors
    /// As there.
    pub fn waiting_room(&self, per_sec: u32, places: usize) -> Result<WaitingRoom> {
        self.0.waiting_room(per_sec, places).map(WaitingRoom)
    }
}

/// [`crate::Stock`] for plain threads.
#[derive(Clone, Debug)]
pub struct Stock(crate::Stock);

impl Stock {
    /// See [`crate::Stock::create`].
    ///
    /// # Errors
    /// As there.
    pub fn create(&self, units: u64, buckets: usize) -> Result<bool> {
        block_on(self.0.create(units, buckets))
    }

    /// See [`crate::Stock::restock`].
    ///
    /// # Errors
    /// As there.
    pub fn restock(&self, units: u64) -> Result<()> {
        block_on(self.0.restock(units))
    }

    /// See [`crate::Stock::take`].
    ///
    /// # Errors
    /// As there.
    pub fn take(&self, amount: u64, hold: impl AsRef<[u8]>) -> Result<Taken> {
        block_on(self.0.take(amount, hold))
    }

    /// See [`crate::Stock::find`].
    ///
    /// # Errors
    /// As there.
    pub fn find(&self, hold: impl AsRef<[u8]>) -> Result<Option<crate::Held>> {
        block_on(self.0.find(hold))
    }

    /// See [`crate::Held::confirm`].
    ///
    /// # Errors
    /// As there.
    pub fn confirm(&self, held: &crate::Held) -> Result<()> {
        block_on(held.confirm())
    }

    /// See [`crate::Held::put_back`].
    ///
    /// # Errors
    /// As there.
    pub fn put_back(&self, held: &crate::Held) -> Result<()> {
        block_on(held.put_back())
    }

    /// See [`crate::Stock::remaining`].
    ///
    /// # Errors
    /// As there.
    pub fn remaining(&self) -> Result<Sum> {
        block_on(self.0.remaining())
    }

    /// See [`crate::Stock::remaining_with`].
    ///
    /// # Errors
    /// As there.
    pub fn remaining_with(&self, max_age: Duration) -> Result<Sum> {
        block_on(self.0.remaining_with(max_age))
    }

    /// See [`crate::Stock::rebalance`].
    ///
    /// # Errors
    /// As there.
    pub fn rebalance(&self) -> Result<u64> {
        block_on(self.0.rebalance())
    }

    /// See [`crate::Stock::gather`].
    ///
    /// # Errors
    /// As there.
    pub fn gather(&self) -> Result<u64> {
        block_on(self.0.gather())
    }

    /// See [`crate::Stock::accounts`].
    ///
    /// # Errors
    /// As there.
    pub fn accounts(&self) -> Result<Accounts> {
        block_on(self.0.accounts())
    }

    /// See [`crate::Stock::reconciler`].
    #[must_use]
    pub fn reconciler(&self) -> Reconciler {
        Reconciler(self.0.reconciler())
    }
}

/// [`crate::Tokens`] for plain threads.
#[derive(Clone, Debug)]
pub struct Tokens(crate::Tokens);

impl Tokens {
    /// See [`crate::Tokens::mint`].
    ///
    /// # Errors
    /// As there.
    pub fn mint(&self, count: u64, lists: usize) -> Result<bool> {
        block_on(self.0.mint(count, lists))
    }

    /// See [`crate::Tokens::mint_more`].
    ///
    /// # Errors
    /// As there.
    pub fn mint_more(&self, count: u64) -> Result<()> {
        block_on(self.0.mint_more(count))
    }

    /// See [`crate::Tokens::pop`].
    ///
    /// # Errors
    /// As there.
    pub fn pop(&self, hold: impl AsRef<[u8]>) -> Result<Popping> {
        block_on(self.0.pop(hold))
    }

    /// See [`crate::Tokens::find`].
    ///
    /// # Errors
    /// As there.
    pub fn find(&self, hold: impl AsRef<[u8]>) -> Result<Option<crate::HeldToken>> {
        block_on(self.0.find(hold))
    }

    /// See [`crate::HeldToken::confirm`].
    ///
    /// # Errors
    /// As there.
    pub fn confirm(&self, token: &crate::HeldToken) -> Result<()> {
        block_on(token.confirm())
    }

    /// See [`crate::HeldToken::put_back`].
    ///
    /// # Errors
    /// As there.
    pub fn put_back(&self, token: &crate::HeldToken) -> Result<()> {
        block_on(token.put_back())
    }

    /// See [`crate::Tokens::remaining`].
    ///
    /// # Errors
    /// As there.
    pub fn remaining(&self) -> Result<Sum> {
        block_on(self.0.remaining())
    }

    /// See [`crate::Tokens::remaining_with`].
    ///
    /// # Errors
    /// As there.
    pub fn remaining_with(&self, max_age: Duration) -> Result<Sum> {
        block_on(self.0.remaining_with(max_age))
    }

    /// See [`crate::Tokens::accounts`].
    ///
    /// # Errors
    /// As there.
    pub fn accounts(&self) -> Result<Accounts> {
        block_on(self.0.accounts())
    }

    /// See [`crate::Tokens::reconciler`].
    #[must_use]
    pub fn reconciler(&self) -> Reconciler {
        Reconciler(self.0.reconciler())
    }
}

/// [`crate::Balance`] for plain threads. Sweeps in the background run on heatsink's own threads.
#[derive(Clone, Debug)]
pub struct Balance(crate::Balance);

impl Balance {
    /// See [`crate::Balance::open`].
    ///
    /// # Errors
    /// As there.
    pub fn open(&self, opening: i64, floor: i64, stripes: usize) -> Result<bool> {
        block_on(self.0.open(opening, floor, stripes))
    }

    /// See [`crate::Balance::credit`].
    ///
    /// # Errors
    /// As there.
    pub fn credit(&self, amount: u64, id: impl AsRef<[u8]>) -> Result<bool> {
        block_on(self.0.credit(amount, id))
    }

    /// See [`crate::Balance::debit`].
    ///
    /// # Errors
    /// As there.
    pub fn debit(&self, amount: u64, id: impl AsRef<[u8]>) -> Result<Debited> {
        block_on(self.0.debit(amount, id))
    }

    /// See [`crate::Balance::reverse`].
    ///
    /// # Errors
    /// As there.
    pub fn reverse(&self, id: impl AsRef<[u8]>) -> Result<bool> {
        block_on(self.0.reverse(id))
    }

    /// See [`crate::Balance::sweep`].
    ///
    /// # Errors
    /// As there.
    pub fn sweep(&self) -> Result<u64> {
        block_on(self.0.sweep())
    }

    /// See [`crate::Balance::total`].
    ///
    /// # Errors
    /// As there.
    pub fn total(&self) -> Result<Sum> {
        block_on(self.0.total())
    }
}

/// [`crate::Reconciler`] for plain threads.
#[derive(Debug)]
pub struct Reconciler(crate::Reconciler);

impl Reconciler {
    /// See [`crate::Reconciler::pass`].
    ///
    /// # Errors
    /// As there.
    pub fn pass(&mut self, decide: impl FnMut(OpenHold<'_>) -> Fate) -> Result<Accounts> {
        block_on(self.0.pass(decide))
    }

    /// See [`crate::Reconciler::give_up`].
    ///
    /// # Errors
    /// As there.
    pub fn give_up(&mut self, hold: impl AsRef<[u8]>) -> Result<u64> {
        block_on(self.0.give_up(hold))
    }
}

/// [`crate::WaitingRoom`] for plain threads.
#[derive(Clone, Debug)]
pub struct WaitingRoom(crate::WaitingRoom);

impl WaitingRoom {
    /// See [`crate::WaitingRoom::enter`].
    ///
    /// # Errors
    /// As there.
    pub fn enter(&self) -> Result<WaitingTicket> {
        self.0.enter().map(WaitingTicket)
    }

    /// See [`crate::WaitingRoom::waiting`].
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.waiting()
    }
}

/// [`crate::WaitingTicket`] for plain threads.
#[derive(Debug)]
pub struct WaitingTicket(crate::WaitingTicket);

impl WaitingTicket {
    /// See [`crate::WaitingTicket::position`].
    #[must_use]
    pub fn position(&self) -> usize {
        self.0.position()
    }

    /// See [`crate::WaitingTicket::estimate`].
    #[must_use]
    pub fn estimate(&self) -> Duration {
        self.0.estimate()
    }

    /// See [`crate::WaitingTicket::admitted`].
    pub fn admitted(&mut self) {
        block_on(self.0.admitted());
    }
}
