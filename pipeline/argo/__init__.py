"""The Argo engine: runs the pipeline as a Workflow on a cluster, through the Kubernetes API.

How it treats each situation:

    ==============================================  ==========================================================
    the same run is active already                  it is shown and followed; ``--force`` starts another one
    the answer to the submission is lost            sent again under the same name: there is one workflow
    another run of the model holds its lock         Pending with Argo's message; it starts when that one ends
    a pod is deleted, preempted or evicted          Argo retries the stage; finished work is reused
    a stage runs out of memory (137)                the run fails with 137 and says that it needs more memory
    a stage fails                                   the run fails with the stage's message, hint and exit code
    the API is not reachable, or answers 5xx, 429   retried (Retry-After is respected), for ten minutes while
                                                    following; the run itself continues
    a watch has expired (410)                       listed again, and followed from there
    forbidden, or not logged in                     ends at once and says what is not allowed (exit code 12)
    Argo or the template is not installed           ends at once and says how to install it (exit code 61)
    somebody deletes the workflow                   ends with exit code 51
    Ctrl-C while following                          the run continues; says how to show and stop it
    ==============================================  ==========================================================
"""
