/*
The protocol of pidlock.py (its docstring; PidLock._attempt and release, _examine, _evict, _create) for SPIN.

Three contenders look, evict, create, hold, release and come again, for ever or not. Each may be killed (-9) before and
after every step, and a new one come in its place; a step of creating may fail (full disk, signal, a sweep that took the
private name). A holder may be killed alone: its command lives on with the inherited flock until it ends. At the start
there is no file, a stale marked one, one with a dead PID, or (not for promise 2) one with a living PID of another
program. A sweeper is an evictor that does not come again.

Promises, checked in all states that can be reached:
  1. Never two holders. A holder's living command is a holder.
  2. A stale file is always eventually taken over when somebody keeps trying (-DLIVENESS, `pan -a -f`: weak fairness):
     from any state in which nothing fails any more somebody holds again and again.
  3. Who unlinks the path has judged or made the very file that it names, and no living holder has it.

More of the world: -DNO_HARD_LINKS (step 4 in place), -DREMOVER (`rm FILE` at any moment: who held it has lost it and
counts no more), -DWRITER (another program writes its PID into the stale file). Less of it: -DNOTHING_FAILS.

Limits. Three contenders, one path. Each system call is one step; step 3's fstat and read count as one, under the flock,
and so do release's and evict's lstat and fstat. A private file that was never linked is gone when its maker is. Not
here: probers (LOCK_SH, they unlink nothing), time-only, slots, threads, network filesystems, content other than marked,
unmarked or empty. Time has no length: an empty file gets old at any moment, but for promise 2 only when its creator is
gone, and a creator in place gets its flock before those that had it for an instant get it again (in the code WRITING
and PATIENCE, 2 s each, stand for that).

What has to fail, one step left out or one race let in, and the shortest counter-example as SPIN 6.5.2 finds it, with
the contenders named in the order of their coming (tests/test_model.py compares):

  -DBLIND_UNLINK -DNOTHING_FAILS -DPROMISE=1
      Step 3 without the same-file check. Another evictor was faster, and the path names a living holder's file by
      now.
    > A opens file 0; A flocks file 0; A judges file 0: stale; B opens file 0; A unlinks the path: file 0; A finds
    > no file; A flocks its new file 1; A publishes file 1; A holds file 1; B flocks file 0; B judges file 0: stale;
    > B unlinks the path: file 1; C finds no file; C flocks its new file 2; C publishes file 2; C holds file 2; TWO
    > HOLDERS
  -DBLIND_UNLINK -DNOTHING_FAILS -DPROMISE=3
      The same: an evictor unlinks a file that it did not judge.
    > A opens file 0; A flocks file 0; A judges file 0: stale; B opens file 0; A unlinks the path: file 0; B flocks
    > file 0; B judges file 0: stale; C finds no file; C flocks its new file 1; C publishes file 1; B unlinks the
    > path: file 1; WHICH IT NEITHER JUDGED NOR MADE
  -DNO_FLOCK_BEFORE_JUDGE -DNOTHING_FAILS
      Step 2 left out. The mark says that the writer keeps the flock for life: who does not ask for the flock takes
      every marked file for stale, a living holder's too.
    > A finds no file; A flocks its new file 0; A publishes file 0; A holds file 0; B opens file 0; B judges file 0:
    > stale; B unlinks the path: file 0; WHICH HAS A LIVING HOLDER
  -DJUDGE_BEFORE_FLOCK -DWRITER -DNOTHING_FAILS
      Step 3 before step 2, and no second look at the content: what was judged is not what was flocked. `echo $$ >
      FILE` writes in place, so that it is the same file all the time.
    > A opens file 0; A judges file 0: stale; another program writes its PID into file 0; A flocks file 0; A unlinks
    > the path: file 0; WHICH HAS A LIVING HOLDER
  -DNO_CONTENT_CHECK -DWRITER -DNOTHING_FAILS
      Step 3 sees that it is the same file, but not that it has the same content: `echo $$ > FILE` writes in place.
    > A opens file 0; A flocks file 0; A judges file 0: stale; another program writes its PID into file 0; A unlinks
    > the path: file 0; WHICH HAS A LIVING HOLDER
  -DUNLOCK_BEFORE_UNLINK -DNOTHING_FAILS -DPROMISE=1
      The evictor unlocks (or closes, which unlocks) before it unlinks. Two evictors have both seen that the path
      names the file that they judged; the slower one unlinks the lock of the faster one.
    > A opens file 0; A flocks file 0; A judges file 0: stale; A unlocks file 0; B opens file 0; B flocks file 0; B
    > judges file 0: stale; A unlinks the path: file 0; A finds no file; A flocks its new file 1; A publishes file
    > 1; A holds file 1; B unlocks file 0; B unlinks the path: file 1; C finds no file; C flocks its new file 2; C
    > publishes file 2; C holds file 2; TWO HOLDERS
  -DRELEASE_UNLOCKS_FIRST -DNOTHING_FAILS -DPROMISE=1
      Release unlocks before it unlinks: its file is marked and unflocked, so an evictor judges it stale. Both have
      seen that the path names it; the slower of the two (here the evictor) unlinks the next holder's file.
    > A finds no file; A flocks its new file 0; A publishes file 0; A holds file 0; A's command ends; A unlocks file
    > 0; B opens file 0; B flocks file 0; B judges file 0: stale; A unlinks the path: file 0; A finds no file; A
    > flocks its new file 1; A publishes file 1; A holds file 1; B unlinks the path: file 1; C finds no file; C
    > flocks its new file 2; C publishes file 2; C holds file 2; TWO HOLDERS
  -DRENAME_OVER -DNOTHING_FAILS -DPROMISE=1
      Step 4 by rename(2): it does not fail when the name is taken.
    > A finds no file; A flocks its new file 0; B finds no file; A publishes file 0; A holds file 0; B flocks its
    > new file 1; B publishes file 1; B holds file 1; TWO HOLDERS
  -DLINK_BEFORE_FLOCK -DNOTHING_FAILS -DPROMISE=1
      Step 4 publishes the file and flocks it then: while the name is there and the flock is not, others judge it
      stale.
    > A finds no file; A publishes file 0; B opens file 0; B flocks file 0; B judges file 0: stale; B unlinks the
    > path: file 0; A flocks its new file 0; A holds file 0; C finds no file; C publishes file 1; C flocks its new
    > file 1; C holds file 1; TWO HOLDERS
  -DRELEASE_BY_PID -DREMOVER -DNOTHING_FAILS -DPROMISE=1
      Release compares the PID in the file with its own, not the file: the lock was lost, and in another container
      the next holder has the same PID.
    > A finds no file; A flocks its new file 0; A publishes file 0; A holds file 0; somebody removes file 0 by hand;
    > B finds no file; B flocks its new file 1; B publishes file 1; A's command ends; B holds file 1; A unlinks the
    > path: file 1; C finds no file; C flocks its new file 2; C publishes file 2; C holds file 2; TWO HOLDERS
  -DNO_INHERIT -DPROMISE=1
      The command does not inherit the descriptor (--close): when pidlock is killed, nothing tells that its command
      lives.
    > A finds no file; A flocks its new file 0; A publishes file 0; A holds file 0; A is killed, its command lives
    > on; A opens file 0; A flocks file 0; A judges file 0: stale; A unlinks the path: file 0; B finds no file; B
    > flocks its new file 1; B publishes file 1; B holds file 1; TWO HOLDERS: A COMMAND LIVES
  -DNO_HARD_LINKS -DNO_CHECK_IN_PLACE -DNOTHING_FAILS -DPROMISE=1
      Step 4 without hard links, and without the look whether the path still names this file: its empty file was
      evicted while it was stopped between creating and flocking it.
    > A finds no file; A creates file 0 in place; file 0 gets old; B opens file 0; B flocks file 0; B judges file 0:
    > stale; B unlinks the path: file 0; A flocks its new file 0; A holds file 0; C finds no file; C creates file 1
    > in place; C flocks its new file 1; C holds file 1; TWO HOLDERS
  -DREMOVER -DREMOVED_AFTER_RELEASES_CHECK -DNOTHING_FAILS -DPROMISE=3
      A race that remains: removed by hand between release's check and its unlink, and taken by the next.
    > A finds no file; A flocks its new file 0; A publishes file 0; A holds file 0; A's command ends; somebody
    > removes file 0 by hand; B finds no file; B flocks its new file 1; B publishes file 1; A unlinks the path: file
    > 1; WHICH IT NEITHER JUDGED NOR MADE
  -DREMOVER -DREMOVED_AFTER_EVICTORS_CHECK -DNOTHING_FAILS -DPROMISE=3
      A race that remains: removed by hand between the evictor's check and its unlink, and taken by the next.
    > A opens file 0; A flocks file 0; A judges file 0: stale; somebody removes file 0 by hand; B finds no file; B
    > flocks its new file 1; B publishes file 1; A unlinks the path: file 1; WHICH IT NEITHER JUDGED NOR MADE
  -DWRITER -DWRITTEN_AFTER_CHECK -DNOTHING_FAILS
      A race that remains: written by another program between the evictor's check and its unlink.
    > A opens file 0; A flocks file 0; A judges file 0: stale; another program writes its PID into file 0; A unlinks
    > the path: file 0; WHICH HAS A LIVING HOLDER
  -DNO_FLOCK -DNOTHING_FAILS -DPROMISE=1
      A race that remains, on a filesystem without flock, where the PID decides: two evictors between check and
      unlink.
    > A opens file 0; A judges file 0: stale; B opens file 0; B judges file 0: stale; A unlinks the path: file 0; A
    > finds no file; A publishes file 1; A holds file 1; B unlinks the path: file 1; C finds no file; C publishes
    > file 2; C holds file 2; TWO HOLDERS
  -DNO_FLOCK -DPROMISE=1
      The same filesystem: the PID of a killed pidlock does not exist, and nothing tells that its command lives.
    > A finds no file; A publishes file 0; A holds file 0; A is killed, its command lives on; A opens file 0; A
    > judges file 0: stale; A unlinks the path: file 0; B finds no file; B publishes file 1; B holds file 1; TWO
    > HOLDERS: A COMMAND LIVES
  -DLIVENESS -DMARK_IGNORED
      A marked file is judged by its PID, which was given to another process since: stale for ever, and never taken
      over.
  -DLIVENESS -DNO_HARD_LINKS -DCLOSE_ALONE
      An evictor gives the flock back by a close alone, which leaves it with a daemon that another thread has forked
      meanwhile. The file was young and empty then, its creator was killed: stale now, and kept busy for ever.
*/

#define CONTENDERS 3
#define FILES 5          /* inodes: one per descriptor, one that the path names, one of a command left behind */
#define NONE FILES
#define NOBODY CONTENDERS
#define COMMAND (CONTENDERS + 1)
#define DAEMON (CONTENDERS + 2)

/* Where a contender is: what it does next. OUT: not there, or killed, or waiting for its next look. */
mtype = { OUT, OPEN, FLOCK, JUDGE, SAME, CONTENT, UNLINK,               /* steps 1 to 3: _examine, _evict */
          CREATE, FLOCK_OWN, WRITE, LINK, SEE,                          /* step 4: _create, _create_in_place */
          HOLD, STILL_OURS, REMOVE,                                     /* release, and taking back a failed step 4 */
          UNLOCK, CLOSE }

/* What a file says. */
mtype = { NOTHING, YOUNG, OLD,  /* empty, and for how long */
          DEAD_PID, LIVING_PID, /* another program's: no mark */
          MARK }

mtype at[CONTENDERS] = OUT;
byte fd[CONTENDERS] = NONE;     /* the file that its one descriptor refers to */
bool lost[CONTENDERS];          /* its file was removed by hand while it held */
mtype body[FILES] = NOTHING;
byte flock[FILES] = NOBODY;     /* who has it */
byte path = NONE;               /* the file that the path names */
byte orphan = NONE;             /* the file whose flock is kept by a command whose pidlock was killed */
bool calm;                      /* from now on nobody is killed */

#define holds(who)         (at[who] == HOLD && !lost[who])
#define anybody_holds      (holds(0) || holds(1) || holds(2))
#define others_hold(who)   ((who != 0 && holds(0)) || (who != 1 && holds(1)) || (who != 2 && holds(2)))
#define has(who, file)     (holds(who) && fd[who] == file)
#define living(file)       (has(0, file) || has(1, file) || has(2, file) || orphan == file || body[file] == LIVING_PID)
#define referenced(file)   (path == file || fd[0] == file || fd[1] == file || fd[2] == file || orphan == file)
#define awaits(who, file)   (fd[who] == file && at[who] == FLOCK_OWN)
#define awaited(file)       (awaits(0, file) || awaits(1, file) || awaits(2, file))
#define creates(who, file) (fd[who] == file && (at[who] == FLOCK_OWN || at[who] == SEE || at[who] == WRITE))
#define unfinished(file)   (creates(0, file) || creates(1, file) || creates(2, file))
#define took(who)          (at[who] == SEE || at[who] == HOLD || at[who] == STILL_OURS || at[who] == REMOVE)
#define wrote(who, file)   (fd[who] == file && took(who))
#define pid_exists(file)   (wrote(0, file) || wrote(1, file) || wrote(2, file))
#define anybody_at(where)  (at[0] == where || at[1] == where || at[2] == where)
#define name(who)          ('A' + who)

/* ---- The promises ---- */

#ifndef PROMISE
#define PROMISE 0 /* all of them */
#endif

/* 1: never two holders. A holder's living command is one. */
#if PROMISE == 0 || PROMISE == 1
#define take_lock()                                                                                                    \
    at[me] = HOLD;                                                                                                     \
    printf("%c holds file %d\n", name(me), fd[me]);                                                                    \
    if                                                                                                                 \
    :: holds(me) && others_hold(me) -> printf("TWO HOLDERS\n"); assert(!others_hold(me))                               \
    :: holds(me) && orphan != NONE -> printf("TWO HOLDERS: A COMMAND LIVES\n"); assert(orphan == NONE)                 \
    :: else                                                                                                            \
    fi
#else
#define take_lock()                                                                                                    \
    at[me] = HOLD;                                                                                                     \
    printf("%c holds file %d\n", name(me), fd[me])
#endif

/* 3: who unlinks the path has judged or made the very file that it names, and no living holder has it. */
#if PROMISE == 0 || PROMISE == 3
#define may_unlink()                                                                                                   \
    if                                                                                                                 \
    :: path != fd[me] -> printf("WHICH IT NEITHER JUDGED NOR MADE\n"); assert(path == fd[me])                          \
    :: path == fd[me] && living(path) -> printf("WHICH HAS A LIVING HOLDER\n"); assert(!living(path))                  \
    :: else                                                                                                            \
    fi
#else
#define may_unlink() skip
#endif

/* 2: a stale file is always eventually taken over when somebody keeps trying; contender 0 does, the others may. */
#ifdef LIVENESS
ltl taken_over { [] (calm -> <> anybody_holds) }
#endif
#ifdef NOTHING_FAILS
#define may_fail false
#else
#define may_fail !calm
#endif

/* The races that remain, and are left out: others in the instant between a check and its unlink. */
#ifdef WRITTEN_AFTER_CHECK
#define may_write true
#else
#define may_write !anybody_at(UNLINK)
#endif
#ifdef REMOVED_AFTER_EVICTORS_CHECK
#define may_remove_1 true
#else
#define may_remove_1 (!anybody_at(CONTENT) && !anybody_at(UNLINK))
#endif
#ifdef REMOVED_AFTER_RELEASES_CHECK
#define may_remove_2 true
#else
#define may_remove_2 !anybody_at(REMOVE)
#endif

/* ---- What the kernel does ---- */

inline new_file(content)
{
    do
    :: referenced(file) -> file++
    :: else -> break
    od;
    assert(file < FILES);
    fd[me] = file;
    body[file] = content;
    flock[file] = NOBODY;
    file = 0
}

/* A file without a name and a descriptor is gone, and its inode number free. */
inline forget(which)
{
    if
    :: which != NONE && !referenced(which) -> body[which] = NOTHING; flock[which] = NOBODY
    :: else
    fi
}

inline unlock()
{
    if
    :: flock[fd[me]] == me -> flock[fd[me]] = NOBODY
    :: else
    fi
}

inline close()
{
    file = fd[me];
    fd[me] = NONE;
    forget(file);
    file = 0
}

inline unlink_path()
{
    if
    :: path == NONE -> printf("%c finds nothing to unlink\n", name(me))
    :: else ->
        printf("%c unlinks the path: file %d\n", name(me), path);
        may_unlink();
        path = NONE
    fi
}

/* ---- A contender: looks, evicts, creates, holds, releases, and comes again ---- */

proctype contender(byte me)
{
    byte file;

end:
    do
    /* Step 1: open what is there, creating nothing. */
    :: d_step { at[me] == OUT -> at[me] = OPEN }
    :: at[me] == OUT && me != 0 -> skip /* nobody has to come again, but for contender 0 */
    :: d_step { at[me] == OPEN && path == NONE -> printf("%c finds no file\n", name(me)); at[me] = CREATE }
    :: d_step { at[me] == OPEN && path != NONE ->
            fd[me] = path;
            printf("%c opens file %d\n", name(me), fd[me]);
#ifdef JUDGE_BEFORE_FLOCK
            at[me] = JUDGE
#else
            at[me] = FLOCK
#endif
        }

    /* Step 2: flock it without waiting. Refused: somebody is behind it. (A creator in place has its turn first, once
       it is calm: others have its file's flock for instants only, and it looks for it again and again.) */
    :: d_step { at[me] == FLOCK && !(calm && awaited(fd[me]) && flock[fd[me]] == NOBODY) ->
            if
#if !defined(NO_FLOCK_BEFORE_JUDGE) && !defined(NO_FLOCK)
            :: flock[fd[me]] != NOBODY -> printf("%c is refused the flock\n", name(me)); close(); at[me] = OUT
#endif
            :: else ->
#if !defined(NO_FLOCK_BEFORE_JUDGE) && !defined(NO_FLOCK)
                flock[fd[me]] = me;
                printf("%c flocks file %d\n", name(me), fd[me]);
#endif
#ifdef JUDGE_BEFORE_FLOCK
                at[me] = SAME
#else
                at[me] = JUDGE
#endif
            fi
        }

    /* Step 3: judge it. Held: give the flock back. */
    :: d_step { at[me] == JUDGE ->
            if
            :: body[fd[me]] == LIVING_PID || body[fd[me]] == YOUNG || body[fd[me]] == NOTHING ->
                printf("%c judges file %d: held\n", name(me), fd[me]);
                at[me] = UNLOCK
#ifdef NO_FLOCK
            :: pid_exists(fd[me]) -> /* all that there is to go by */
                printf("%c judges file %d: held\n", name(me), fd[me]);
                at[me] = UNLOCK
#endif
#ifdef MARK_IGNORED
            :: body[fd[me]] == MARK -> /* its PID was given to another process since */
                printf("%c judges file %d: held\n", name(me), fd[me]);
                at[me] = UNLOCK
#endif
            :: else ->
                printf("%c judges file %d: stale\n", name(me), fd[me]);
#ifdef JUDGE_BEFORE_FLOCK
                at[me] = FLOCK
#else
                at[me] = SAME
#endif
            fi
        }

    /* Step 3: stale: see that the path still names this file... */
    :: d_step { at[me] == SAME ->
#ifdef BLIND_UNLINK
            at[me] = CONTENT
#else
            if
            :: path == fd[me] -> at[me] = CONTENT
            :: else -> printf("%c sees that the path names another file\n", name(me)); at[me] = UNLOCK
            fi
#endif
        }

    /* ...with this content... */
    :: d_step { at[me] == CONTENT ->
#if defined(NO_CONTENT_CHECK) || defined(JUDGE_BEFORE_FLOCK)
            at[me] = UNLINK
#else
            if
            :: body[fd[me]] == LIVING_PID -> printf("%c sees that it was written to\n", name(me)); at[me] = UNLOCK
            :: else -> at[me] = UNLINK
            fi;
#endif
#ifdef UNLOCK_BEFORE_UNLINK
            if
            :: at[me] == UNLINK -> unlock(); printf("%c unlocks file %d\n", name(me), fd[me])
            :: else
            fi
#endif
        }

    /* ...unlink it while holding its flock, start over. */
    :: d_step { at[me] == UNLINK -> unlink_path(); at[me] = UNLOCK }
    :: d_step { at[me] == UNLOCK ->
#ifdef CLOSE_ALONE
            if /* meanwhile another thread has forked a daemon: that keeps the flock */
            :: flock[fd[me]] == me -> flock[fd[me]] = DAEMON
            :: else
            fi;
#else
            unlock();
#endif
            at[me] = CLOSE
        }
    :: d_step { at[me] == CLOSE -> close(); at[me] = OUT }

#ifndef NO_HARD_LINKS
    /* Step 4: create a private file, flock it, write the whole record, link(2) it to the path. */
    :: d_step { at[me] == CREATE ->
            new_file(NOTHING);
#ifdef LINK_BEFORE_FLOCK
            at[me] = WRITE
#else
            at[me] = FLOCK_OWN
#endif
        }
    :: d_step { at[me] == FLOCK_OWN && flock[fd[me]] == NOBODY ->
#ifndef NO_FLOCK
            flock[fd[me]] = me;
            printf("%c flocks its new file %d\n", name(me), fd[me]);
#endif
#ifdef LINK_BEFORE_FLOCK
            take_lock()
#else
            at[me] = WRITE
#endif
        }
    :: d_step { at[me] == WRITE -> body[fd[me]] = MARK; at[me] = LINK }
    :: d_step { at[me] == LINK ->
            if
#ifndef RENAME_OVER
            :: path != NONE -> printf("%c finds the path taken\n", name(me)); at[me] = STILL_OURS
#endif
            :: else ->
#ifdef RENAME_OVER
                file = path;
                path = fd[me];
                forget(file);
                file = 0;
#else
                path = fd[me];
#endif
                printf("%c publishes file %d\n", name(me), fd[me]);
                at[me] = SEE
            fi
        }
    /* See that the path names our file. */
    :: d_step { at[me] == SEE ->
            if
            :: path == fd[me] ->
#ifdef LINK_BEFORE_FLOCK
                at[me] = FLOCK_OWN
#else
                take_lock()
#endif
            :: else -> printf("%c sees that the path names another file\n", name(me)); at[me] = STILL_OURS
            fi
        }
#else
    /* Step 4 without hard links: O_CREAT|O_EXCL on the path itself, then flock, check, write. */
    :: d_step { at[me] == CREATE ->
            if
            :: path != NONE -> at[me] = OUT
            :: else ->
                new_file(YOUNG);
                path = fd[me];
                printf("%c creates file %d in place\n", name(me), fd[me]);
                at[me] = FLOCK_OWN
            fi
        }
    :: d_step { at[me] == FLOCK_OWN && flock[fd[me]] == NOBODY ->
            flock[fd[me]] = me;
            printf("%c flocks its new file %d\n", name(me), fd[me]);
            at[me] = SEE
        }
    :: d_step { at[me] == SEE ->
            if
#ifndef NO_CHECK_IN_PLACE
            :: path != fd[me] -> printf("%c sees that the path names another file\n", name(me)); at[me] = STILL_OURS
#endif
            :: else -> at[me] = WRITE
            fi
        }
    :: d_step { at[me] == WRITE -> body[fd[me]] = MARK; take_lock() }
#endif

    /* A full disk, a signal, a sweep that took the private name: take back what was made, but nothing unflocked. */
    :: d_step { at[me] == FLOCK_OWN && may_fail -> at[me] = CLOSE }
    :: d_step { (at[me] == WRITE || at[me] == LINK || at[me] == SEE) && may_fail ->
            lost[me] = false;
            at[me] = STILL_OURS
        }

    /* The command has ended. Release: if the path still names our file, unlink it, unlock, close. */
    :: d_step { at[me] == HOLD ->
            printf("%c's command ends\n", name(me));
            lost[me] = false;
#ifdef RELEASE_BY_PID
            if
            :: path != NONE && body[path] == MARK -> at[me] = REMOVE /* in two containers the PIDs are the same */
            :: else -> at[me] = UNLOCK
            fi
#else
            at[me] = STILL_OURS
#endif
        }
    :: d_step { at[me] == STILL_OURS ->
            if
            :: path == fd[me] ->
                at[me] = REMOVE;
#ifdef RELEASE_UNLOCKS_FIRST
                unlock();
                printf("%c unlocks file %d\n", name(me), fd[me])
#endif
            :: else -> at[me] = UNLOCK
            fi
        }
    :: d_step { at[me] == REMOVE -> unlink_path(); at[me] = UNLOCK }

    /* kill -9 at any step; the kernel closes the descriptor. A new contender may come in its place. */
    :: d_step { at[me] != OUT && may_fail ->
            printf("%c is killed\n", name(me));
            lost[me] = false;
            at[me] = OUT;
            if
            :: fd[me] != NONE -> unlock(); close()
            :: else
            fi
        }
    /* kill -9 of the holder alone: its command lives on and keeps the inherited flock. */
    :: d_step { holds(me) && may_fail && orphan == NONE ->
            printf("%c is killed, its command lives on\n", name(me));
            at[me] = OUT;
            orphan = fd[me];
#ifdef NO_INHERIT
            flock[orphan] = NOBODY;
#else
            flock[orphan] = COMMAND;
#endif
            fd[me] = NONE
        }
    od
}

/* ---- What is around it ---- */

proctype commands_end()
{
    byte file;

end:
    do
    :: d_step { orphan != NONE ->
            file = orphan;
            orphan = NONE;
            if
            :: flock[file] == COMMAND -> flock[file] = NOBODY
            :: else
            fi;
            file = 0
        }
    od
}

#ifdef NO_HARD_LINKS
proctype time_passes()
{
end:
    do
    :: d_step { path != NONE && body[path] == YOUNG && !(calm && unfinished(path)) ->
            body[path] = OLD;
            printf("file %d gets old\n", path)
        }
    od
}
#endif

#ifdef WRITER
/* Another program, with no flock: `echo $$ > FILE` into the stale file that it, too, takes for dead. */
proctype writer()
{
    d_step { path != NONE && body[path] == DEAD_PID && may_write ->
        body[path] = LIVING_PID;
        printf("another program writes its PID into file %d\n", path)
    }
}
#endif

#ifdef REMOVER
/* `rm FILE` by hand: who held it has lost it and counts no more. */
proctype remover()
{
    byte file;

end:
    do
    :: d_step { path != NONE && may_remove_1 && may_remove_2 ->
            printf("somebody removes file %d by hand\n", path);
            lost[0] = lost[0] || (fd[0] == path && (at[0] == HOLD || at[0] == WRITE));
            lost[1] = lost[1] || (fd[1] == path && (at[1] == HOLD || at[1] == WRITE));
            lost[2] = lost[2] || (fd[2] == path && (at[2] == HOLD || at[2] == WRITE));
            file = path;
            path = NONE;
            if
            :: orphan == file -> orphan = NONE
            :: else
            fi;
            forget(file);
            file = 0
        }
    od
}
#endif

init
{
    atomic {
        if
        :: path = NONE
        :: d_step { path = 0; body[0] = MARK }
        :: d_step { path = 0; body[0] = DEAD_PID }
#ifndef LIVENESS
        :: d_step { path = 0; body[0] = LIVING_PID }
#endif
        fi;
        run contender(0);
        run contender(1);
        run contender(2);
        run commands_end();
#ifdef NO_HARD_LINKS
        run time_passes();
#endif
#ifdef WRITER
        run writer();
#endif
#ifdef REMOVER
        run remover();
#endif
    }
#ifdef LIVENESS
    calm = true
#endif
}
